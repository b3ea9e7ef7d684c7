#!/bin/sh
# The safetensors tool: what it prints, what it makes, and how it ends.
set -u
cd "$(dirname "$0")/../.."
tool=$PWD/build/safetensors
gpt=$PWD/build/train_gpt
text=$PWD/README.md
work=$(mktemp -d "${TMPDIR:-/tmp}/safetensors.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
passed=0
failed=0

good() { passed=$((passed + 1)); }
bad() {
    failed=$((failed + 1))
    echo "FAIL $1"
    head -8 out err 2>/dev/null
}
ends() { # name, status, command...
    name=$1
    expected=$2
    shift 2
    "$@" >out 2>err
    status=$?
    if [ $status -eq "$expected" ]; then good; else bad "$name: ended with $status, expected $expected"; fi
}
prints() { # name, text: what the last command printed
    printf '%s\n' "$2" >expected
    if cmp -s out expected; then good; else bad "$1: printed something else"; fi
}
says() { # name, text: in the last command's errors, which are one line
    if grep -qF -- "$2" err && [ "$(wc -l <err)" -eq 1 ]; then good; else bad "$1: said something else"; fi
}
# A file of a header and data, both given to printf. Headers here have fewer than 256 bytes.
file() { # name, header, data
    printf "$2" >header
    bytes=$(wc -c <header)
    { printf "\\$(printf %o "$bytes")\\000\\000\\000\\000\\000\\000\\000"; cat header; printf "$3"; } >"$1"
}

# 1.5, -2 as float32; 255, 1 as bytes; -1 as int16
file a.safetensors '{"__metadata__":{"by":"hand","n\\n":""},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"u":{"dtype":"U8","shape":[2],"data_offsets":[8,10]},"i":{"dtype":"I16","shape":[],"data_offsets":[10,12]}}' \
    '\000\000\300\077\000\000\000\300\377\001\377\377'
ends "ls" 0 "$tool" ls a.safetensors
prints "ls" '# by: hand
# "n\n": ""
F32                      8  w [2,1]
U8                       2  u [2]
I16                      2  i []
# 3 tensors in 1 file, 5 elements, 12 bytes'
ends "cat" 0 "$tool" cat a.safetensors w
prints "cat" '1.5
-2'
ends "cat of a byte" 0 "$tool" cat a.safetensors u 0 1
prints "cat of a byte" 255
ends "cat from an element on" 0 "$tool" cat a.safetensors u 1
prints "cat from an element on" 1
ends "cat of a scalar" 0 "$tool" cat a.safetensors i
prints "cat of a scalar" -1
ends "cat of nothing" 2 "$tool" cat a.safetensors x
says "cat of nothing" 'there is no tensor "x"'

ends "verify" 0 "$tool" verify a.safetensors
prints "verify" 'a.safetensors: ok, 3 tensors, 12 bytes'
head -c 211 a.safetensors >cut.safetensors
{ cat a.safetensors; printf x; } >longer.safetensors
ends "verify of a longer file" 1 "$tool" verify longer.safetensors
says "verify of a longer file" 'longer.safetensors breaks R20 at byte '
ends "verify of a cut file" 1 "$tool" verify a.safetensors cut.safetensors
says "verify of a cut file" 'cut.safetensors breaks R'
file hole.safetensors '{"w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}' 'xx'
ends "verify of a hole" 1 "$tool" verify hole.safetensors
says "verify of a hole" 'hole.safetensors breaks R16 at byte 9: tensor "w": its data begin at 1'
ends "verify of nothing" 2 "$tool" verify absent.safetensors
says "verify of nothing" 'absent.safetensors'
ends "ls of a broken file" 1 "$tool" ls hole.safetensors

file b.safetensors '{"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"u":{"dtype":"U8","shape":[1,2],"data_offsets":[8,10]},"j":{"dtype":"I16","shape":[],"data_offsets":[10,12]}}' \
    '\000\000\300\077\000\000\200\277\377\001\377\377'
ends "diff" 1 "$tool" diff a.safetensors b.safetensors
prints "diff" '- # by: hand
- # "n\n": ""
- i: I16 []
+ j: I16 []
~ w: 1 of 2 elements differ, by at most 1
! u: U8 [2] and U8 [1,2]'
ends "diff of one file" 0 "$tool" diff a.safetensors a.safetensors
ends "diff with nothing" 2 "$tool" diff a.safetensors absent.safetensors
ends "diff with a broken file" 2 "$tool" diff hole.safetensors a.safetensors

ends "split" 0 "$tool" split a.safetensors parts --size 8B
ends "ls of parts" 0 "$tool" ls parts
prints "ls of parts" '# by: hand
# "n\n": ""
# format: pt
F32                      8  w [2,1]
I16                      2  i []
U8                       2  u [2]
# 3 tensors in 2 files, 5 elements, 12 bytes'
ends "verify of parts" 0 "$tool" verify parts parts/model.safetensors.index.json
sed 's/"w": "model-00001/"w": "model-00002/' parts/model.safetensors.index.json >index && mv index parts/model.safetensors.index.json
ends "verify of an index that is wrong" 1 "$tool" verify parts
says "verify of an index that is wrong" 'parts breaks S6: "w" is not in model-00002-of-00002.safetensors'
rm -r parts
ends "split again" 0 "$tool" split a.safetensors parts --size 8B
ends "split to where something is" 2 "$tool" split a.safetensors parts
ends "merge" 0 "$tool" merge parts merged.safetensors
ends "diff of merged" 1 "$tool" diff a.safetensors merged.safetensors
prints "diff of merged" '+ # format: pt'
ends "merge of merged" 0 "$tool" merge merged.safetensors again.safetensors
ends "the same bytes" 0 cmp merged.safetensors again.safetensors

ends "convert" 0 "$tool" convert a.safetensors half.safetensors --dtype bf16
ends "ls of converted" 0 "$tool" ls half.safetensors
prints "ls of converted" '# by: hand
# "n\n": ""
BF16                     4  w [2,1]
I16                      2  i []
U8                       2  u [2]
# 3 tensors in 1 file, 5 elements, 8 bytes'
ends "cat of converted" 0 "$tool" cat half.safetensors w
prints "cat of converted" '1.5
-2'
ends "diff of converted" 1 "$tool" diff a.safetensors half.safetensors
prints "diff of converted" '! w: F32 [2,1] and BF16 [2,1]'
ends "options before paths" 0 "$tool" convert --dtype bf16 a.safetensors half2.safetensors
if cmp -s half.safetensors half2.safetensors; then good; else bad "options before paths: another file"; fi
ends "convert in place" 0 "$tool" convert half.safetensors half.safetensors --dtype F64
ends "cat of a double" 0 "$tool" cat half.safetensors w 1
prints "cat of a double" -2
file large.safetensors '{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}' '\000\000\372\103\000\000\200\377\000\000\200\077'
ends "convert to E4M3" 0 "$tool" convert large.safetensors small.safetensors --dtype f8_e4m3 --saturate
ends "cat of E4M3" 0 "$tool" cat small.safetensors x
prints "cat of E4M3" '448
-448
1'
ends "convert without saturation" 0 "$tool" convert large.safetensors small.safetensors --dtype f8_e4m3
ends "cat of what overflows" 0 "$tool" cat small.safetensors x 0 1
prints "cat of what overflows" nan

ends "training" 0 "$gpt" --ranks 2 --layers 1 --heads 2 --width 32 --context 16 --steps 2 --every 1 --quiet \
    --text "$text" --csv loss.csv --svg loss.svg --save run
ends "verify of checkpoints" 0 "$tool" verify run run/step-1 run/step-2
prints "verify of checkpoints" 'run: ok, a checkpoint
run/step-1: ok, a checkpoint
run/step-2: ok, a checkpoint'
ends "export" 0 "$tool" export run weights.safetensors
ends "export of an older step" 0 "$tool" export run/step-1 older.safetensors --optimizer
ends "verify of exported" 0 "$tool" verify weights.safetensors older.safetensors
"$tool" ls weights.safetensors >out
if grep -q '^F32 .* wte \[256,32\]$' out && ! grep -q adam out; then good; else bad "ls of exported"; fi
"$tool" ls older.safetensors >out
if grep -q '^F32 .* wte \[256,32\]$' out && grep -q 'wte@adam.v \[256,32\]$' out; then good; else bad "ls of all exported"; fi
damaged=$(ls run/step-2/rank-00001.*.safetensors | grep -v hashes)
printf '\001' | dd of="$damaged" bs=1 seek=4000 conv=notrunc 2>dd.log
ends "verify of a damaged checkpoint" 1 "$tool" verify run/step-2
says "verify of a damaged checkpoint" "$(basename "$damaged")"
ends "export of a damaged checkpoint" 1 "$tool" export run/step-2 damaged.safetensors
if [ ! -e damaged.safetensors ]; then good; else bad "a file was exported of damaged data"; fi
ends "ls of a checkpoint" 2 "$tool" ls run
if grep -q 'run may be a checkpoint: "safetensors export" makes a file of it first' err; then good; else bad "ls of a checkpoint"; fi
mkdir torch # as torch.distributed.checkpoint leaves it
printf x >torch/.metadata
printf x >torch/__0_0.distcp
for command in "ls torch" "verify torch" "export torch x.safetensors"; do
    ends "$command of PyTorch's" 2 "$tool" $command
    if grep -q 'format_utils dcp_to_torch torch model.pt' err && ! grep -q 'safetensors export' err; then good; else bad "$command of PyTorch's"; fi
done
ends "export of nothing" 2 "$tool" export absent some.safetensors

refused() { # what is said, command line: status 2, nothing on standard output, and one line that points to --help
    text=$1
    shift
    ends "$*" 2 "$tool" "$@"
    says "$*" "safetensors: $text; see safetensors --help"
    if [ ! -s out ]; then good; else bad "$*: printed something"; fi
}
refused 'COMMAND: a command is expected'
refused 'frobnicate: there is no such command' frobnicate a.safetensors
refused 'ls: one PATH is expected' ls
refused 'ls: one PATH is expected' ls a.safetensors b.safetensors
refused 'diff: two paths are expected' diff a.safetensors
refused 'BEGIN 1x: a number from 0 to 2 is expected' cat a.safetensors w 1x
refused 'COUNT 2: a number from 0 to 1 is expected' cat a.safetensors w 1 2
refused '--sise: there is no such flag' ls a.safetensors --sise 8B
refused '--dtype: it is a flag of convert, not of merge' merge a.safetensors same.safetensors --dtype bf16
refused '--size: it is a flag of split, and --dtype one of convert' convert a.safetensors same.safetensors --dtype bf16 --size 5GB
refused '--dtype i32: f64, f32, f16, bf16, f8_e4m3 or f8_e5m2 is expected' convert a.safetensors same.safetensors --dtype i32
refused '--dtype: f64, f32, f16, bf16, f8_e4m3 or f8_e5m2 is expected' convert a.safetensors same.safetensors --dtype
refused 'convert: a PATH, a FILE and --dtype are expected' convert a.safetensors same.safetensors
refused '--saturate: it needs --dtype f8_e4m3 or f8_e5m2' convert a.safetensors same.safetensors --dtype f16 --saturate
for size in 5XB 0 -5GB +5GB 99999999999999999999 99999999999TB 5GBx; do
    refused "--size $size: a size such as 5GB or 512MiB is expected" split a.safetensors same.safetensors --size $size
done
refused 'export: a CHECKPOINT and a FILE are expected' export run
refused 'verify: one PATH or more are expected' verify
refused 'cat: a PATH, a NAME and perhaps BEGIN and COUNT are expected' cat a.safetensors w 0 1 2
if [ ! -e same.safetensors ]; then good; else bad "a file was written after a wrong command line"; fi
mkfifo pipe
ends "a pipe in the way" 2 "$tool" merge a.safetensors pipe
if [ -p pipe ]; then good; else bad "a file took the place of a pipe"; fi
cp a.safetensors ./--size
ends "a path like an option" 0 "$tool" ls -- --size
if [ -e /dev/full ]; then
    "$tool" ls a.safetensors >/dev/full 2>err
    if [ $? -eq 2 ]; then good; else bad "a full disk for the output"; fi
fi
[ "$(ls -A | grep -c '\.tmp$')" -eq 0 ] && good || bad "something is left over"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
