#!/bin/sh
# train_gpt under meshes of 8 ranks: the loss of every step is that of one rank, layouts that only deal layers and
# micro-batches end with its bits, checkpoints go from one layout to another, and what cannot be is refused. With
# MESHES=all every factoring of 8 ranks, sharded and not. Ends with "N passed, N failed".
cd "$(dirname "$0")/../.." || exit 1
dir=$(mktemp -d build/meshes.XXXXXX) || exit 1
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
. tests/support/check.sh
logs="$dir/log"
model="--layers 8 --heads 8 --width 32 --context 16 --batch 2 --micro 8 --steps 50 --text examples/train_gpt.c --quiet"

train() { # name, flags; its result goes to $dir/log, its losses to $dir/NAME.csv
    out=$1
    shift
    # shellcheck disable=SC2086
    timeout 120 build/train_gpt $model --csv "$dir/$out.csv" --svg "$dir/$out.svg" "$@" >"$dir/log" 2>&1
}

bits() {
    sed -n 's/.*weights_sha256=\([0-9a-f]*\).*/\1/p' "$dir/log"
}

# Every step's loss is within 1e-4 of the first run's, relative; as many steps.
near() { # name, other name
    paste -d, "$dir/$1.csv" "$dir/$2.csv" >"$dir/both"
    awk -F, -v half="$(head -1 "$dir/$1.csv" | awk -F, '{ print NF }')" '
        NR > 1 { a = $2; b = $(half + 2); d = a > b ? a - b : b - a; n += $1 == $(half + 1) && a > 0 && d <= 1e-4 * a }
        END { exit !(NR == 51 && n == 50) }' "$dir/both"
}

refused() { # text, flags
    text=$1
    shift
    train refused "$@"
    [ $? -eq 1 ] && grep -qF -e "$text" "$dir/log"
    check $? "refused: $text"
}

train single || { cat "$dir/log"; echo "0 passed, 1 failed"; exit 1; }
train one --mesh dp=1
one=$(bits)
near single one
check $? "layers of a module have the losses of the loop"

layouts="dp=2,pp=2,tp=2 pp=8 pp=2,tp=4"
[ "${MESHES:-}" != all ] || layouts="dp=8 pp=8 tp=8 dp=4,pp=2 dp=2,pp=4 dp=4,tp=2 dp=2,tp=4 pp=4,tp=2 pp=2,tp=4 dp=2,pp=2,tp=2"
for layout in $layouts; do
    for strategy in ddp full; do
        [ $strategy = ddp ] || [ "${MESHES:-}" = all ] || [ $layout = dp=2,pp=2,tp=2 ] || continue
        train layout --ranks 8 --mesh $layout --strategy $strategy && near single layout
        check $? "$layout with strategy $strategy has the losses of one rank"
        case $layout in
        *tp*) ;;
        *)
            [ "$(bits)" = "$one" ]
            check $? "$layout with strategy $strategy ends with the bits of one rank"
            ;;
        esac
    done
done

train zb --ranks 8 --mesh pp=4,dp=2 --schedule zb --strategy grad && [ "$(bits)" = "$one" ]
check $? "zero-bubble pipelines end with the bits of one rank"
train gpipe --ranks 8 --mesh pp=4,dp=2 --schedule gpipe --recompute && [ "$(bits)" = "$one" ]
check $? "GPipe that recomputes ends with the bits of one rank"
train chunks --ranks 4 --mesh pp=2,dp=2 --schedule interleaved --chunks 4 && [ "$(bits)" = "$one" ]
check $? "interleaved pipelines end with the bits of one rank"
train uneven --ranks 3 --mesh tp=3 --sequence && near single uneven
check $? "three ranks split eight heads, and rows between"
train threads --ranks 4 --mesh pp=2,tp=2 --schedule zb --sequence
threads=$(bits)
# shellcheck disable=SC2086
timeout 120 build/dtrun -n 4 build/train_gpt $model --csv "$dir/processes.csv" --svg "$dir/processes.svg" \
    --mesh pp=2,tp=2 --schedule zb --sequence >"$dir/log" 2>&1
[ -n "$threads" ] && [ "$(bits)" = "$threads" ]
check $? "processes have the bits of threads"

# A resumed run writes its own steps: those of the first run come before them.
joined() { # name
    { head -21 "$dir/half.csv" && sed 1d "$dir/$1.csv"; } >"$dir/half_$1.csv" && near single "half_$1"
}
for way in "eight:--ranks 8 --mesh dp=8 --strategy full:--ranks 8 --mesh pp=2,tp=4" \
    "split:--ranks 8 --mesh pp=2,tp=4:--ranks 8 --mesh dp=8 --strategy full" \
    "loop:--ranks 6 --mesh pp=2,tp=3 --schedule interleaved:--ranks 2 --strategy grad"; do
    name=${way%%:*}
    flags=${way#*:}
    rm -rf "$dir/run"
    # shellcheck disable=SC2086
    train half ${flags%%:*} --save "$dir/run" --until 20 && train $name ${flags#*:} --save "$dir/run" --resume &&
        joined $name
    check $? "a checkpoint goes on elsewhere: $flags"
done

refused "is for 2 x 2 x 2 = 8 ranks, and there are 4" --ranks 4 --mesh dp=2,pp=2,tp=2
refused "makes 16 stages of 8 layers: at most 4 fit" --ranks 8 --mesh pp=8 --schedule interleaved
refused "splits 8 heads over 9 ranks: at most 8 fit" --ranks 9 --mesh tp=9
refused "--micro must be a multiple of 3" --ranks 3 --mesh dp=3
refused "flag --micro 0: needs a number from 1" --mesh dp=1 --micro 0
refused "needs sizes from 1 to 1024, each once" --mesh dp=2,dp=2
refused "needs sizes from 1 to 1024, each once" --mesh dp=2,
refused "possible are gpipe, 1f1b, interleaved, zb" --mesh dp=1 --schedule 2f2b
refused "needs --mesh" --schedule zb
refused "this model is too large: 1 ranks need about" --mesh dp=1 --schedule gpipe --batch 64 --micro 65536
refused "under --local-steps each of 4 ranks needs one or more" --ranks 4 --micro 3 --local-steps 2
refused "its loss is not finite: a lower --lr may help" --ranks 2 --local-steps 9 --lr 1000 --clip 0 --optimizer sgd
refused "does not go with --local-steps" --ranks 2 --local-steps 2 --compress topk:0.1
refused "does not go with --local-steps" --ranks 2 --local-steps 2 --compress powersgd:2
checked
