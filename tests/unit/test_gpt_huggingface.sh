#!/bin/sh
# train_gpt --open, --export, --tokens and --tied: a model that is exported and opened again is the same, tied or not,
# under every strategy; what it cannot compute or read is refused. tests/interop/huggingface.py asks transformers.
# Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
unset MAKEFLAGS MFLAGS MAKELEVEL # a make of its own, also below make
mkdir -p build
dir=$(mktemp -d build/test_gpt_huggingface.XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/out $dir/log"
make -s build/train_gpt build/dtrun >"$dir/log" 2>&1

gpt() { # arguments; the weights' hash is in $hash
    timeout 60 $launcher build/train_gpt --context 8 --batch 2 --micro 4 --quiet --csv "$dir/csv" --svg "$dir/svg" "$@" \
        >"$dir/out" 2>"$dir/log"
    hash=$(sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p' "$dir/out")
    [ -n "$hash" ]
}
refused() { # text arguments
    text=$1
    shift
    ! gpt "$@" && grep -qF "$text" "$dir/log"
}

awk 'BEGIN { for (i = 0; i < 2000; i++) printf "%c%c", 1 + i * i % 97, i % 11 == 5 ? 1 : 0 }' >"$dir/tokens"
tokens="--tokens $dir/tokens --vocab 1000"
model="--layers 2 --heads 2 --width 12"
launcher=
for tied in "" --tied; do
    name=${tied:-untied}
    gpt $tokens $model $tied --steps 3 --export "$dir/model$tied"
    check $? "a model is exported, $name"
    made=$hash
    gpt $tokens --open "$dir/model$tied" --steps 1 --lr 0 && [ "$hash" = "$made" ]
    check $? "opened, it is the same, $name"
    for strategy in ddp grad full "hybrid --shard-size 2"; do
        gpt $tokens --open "$dir/model$tied" --steps 4 --ranks 4 --strategy $strategy --export "$dir/again$tied$strategy"
        [ "$strategy" != ddp ] || trained=$hash
        [ -n "$trained" ] && [ "$hash" = "$trained" ] &&
            cmp "$dir/again$tied$strategy/model.safetensors" "$dir/again${tied}ddp/model.safetensors" >"$dir/log" 2>&1
        check $? "trained on by four ranks under $strategy, it has the same weights and the same file, $name"
    done
    launcher="build/dtrun -n 3"
    gpt $tokens --open "$dir/model$tied" --steps 1 --lr 0 --strategy full && [ "$hash" = "$made" ]
    check $? "three processes open it, $name"
    launcher=
    gpt $tokens --open "$dir/model$tied" --steps 4 --ranks 2 --save "$dir/run$tied" --until 2 --strategy full &&
        gpt $tokens --open "$dir/model$tied" --steps 4 --save "$dir/run$tied" --resume && [ "$hash" = "$trained" ]
    check $? "a run that is resumed on another number of ranks has the same weights, $name"
    gpt $tokens --open "$dir/model$tied" --steps 4 --ranks 2 --aggregator ps --export "$dir/server$tied"
    check $? "it trains through a parameter server, $name"
    gpt $tokens --open "$dir/model$tied" --steps 4 --ranks 2 --local-steps 2 --export "$dir/local$tied"
    check $? "it trains locally, $name"
done

gpt --text LICENSE $model --steps 2 --tied && one=$hash
gpt --text LICENSE $model --steps 2 --tied --ranks 2 --strategy full && [ "$hash" = "$one" ]
check $? "bytes train a tied model"
refused "is there already, and not empty" $tokens $model --steps 1 --export "$dir/model"
check $? "a directory that holds something is no place to export to"
refused "Not a directory" $tokens $model --steps 1 --export "$dir/tokens"
check $? "a file is no place to export to"
refused "has too long a path" $tokens $model --steps 1 --export "$dir/$(printf '%0100d/%0100d/%0100d/%0100d/%0100d' 1 2 3 4 5)"
check $? "a path that has no room for config.json is refused"
refused "token 5 is 282, and the vocabulary has 256" --tokens "$dir/tokens" $model --steps 1
check $? "a token beyond the vocabulary is refused"
head -c 3999 "$dir/tokens" >"$dir/cut"
refused "ends inside a token" --tokens "$dir/cut" --vocab 1000 $model --steps 1
check $? "a file that ends inside a token is refused"
refused "is 16 or 32" $tokens --token-bits 24 --steps 1
check $? "a token has 16 or 32 bits"
refused "goes with no --open" --mesh pp=2 --ranks 2 --tied --steps 1
check $? "a mesh goes with no tied head"
change() { # sed-script: of the model's config.json
    rm -rf "$dir/other"
    cp -r "$dir/model" "$dir/other"
    sed "$1" "$dir/model/config.json" >"$dir/other/config.json"
}
while read -r script text; do
    change "$script"
    refused "$text" $tokens --open "$dir/other" --steps 1
    check $? "config.json after $script is refused"
done <<'LIST'
s/"gpt2"/"llama"/ only that is known
s/gelu_new/relu/ only "gelu_new" is computed
s/1e-05/1e-06/ only 1e-05 is computed
s/"n_head":.2/"n_head":5/ no multiple of n_head
s/"n_layer":.2/"n_layer":3/ the model has no tensor h.2.ln_1.weight
s/"n_layer":.2/"n_layer":1/ is none of this model's
s/"n_layer":.2/"n_layer":2.5/ needs "n_layer", a whole number
s/"n_layer":.2/"n_layer":99999999999999999999/ needs "n_layer", a whole number
s/"n_positions":.8/"n_positions":7/ has 7 positions: --context 8 is more
s/"vocab_size":.1000/"vocab_size":1001/ has another shape than config.json says: 1001 x 12
s/n_embd/n_embed/ needs "n_embd"
s/"n_inner":.null/"n_inner":13/ only 4 * n_embd is computed
2,$d only that is known
LIST
checked
