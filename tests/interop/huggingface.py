"""GPT-2 models between train_gpt and transformers, both ways.

    huggingface.py TRAIN_GPT DTRUN DIRECTORY

A small random GPT2LMHeadModel of transformers is opened by train_gpt, which has torch's loss; a model that train_gpt has
trained is loaded by transformers with no key missing or left over, and torch has train_gpt's loss. The loss is that of
train_gpt's held-out sequences, which are 32 of the last tenth of the tokens."""
import json
import os
import re
import shutil
import subprocess
import sys

import numpy
import safetensors.numpy
import safetensors.torch
import torch
import transformers

train_gpt, dtrun, directory = sys.argv[1:4]
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
passed = failed = 0
POSITIONS, CONTEXT, HELD_OUT = 24, 16, 32
VOCABULARIES = {16: 1000, 32: 70000}


def check(fact, what):
    global passed, failed
    passed += bool(fact)
    failed += not fact
    if not fact:
        print("FAIL: " + what)


def path(name):
    return os.path.join(directory, name)


def fresh(name):
    shutil.rmtree(path(name), ignore_errors=True)
    return path(name)


def run(*arguments, bits=16, launcher=()):
    """What train_gpt says of a run on the tokens of this width: its hash and held-out loss, or its complaint."""
    command = [*launcher, train_gpt, "--tokens", path("tokens%d" % bits), "--token-bits", str(bits), "--context",
               str(CONTEXT), "--batch", "2", "--micro", "4", "--quiet", "--csv", path("csv"), "--svg", path("svg")]
    done = subprocess.run(command + list(arguments), capture_output=True, text=True)
    found = re.search(r"weights_sha256=(\w+) .*val_loss=([\d.]+)", done.stdout)
    return (found.group(1), float(found.group(2))) if found else (done.stderr.strip(), -1.0)


def torch_loss(model, tokens):
    train = len(tokens) // 10 * 9
    room = len(tokens) - train - CONTEXT
    begins = [train + i * (room - 1) // (HELD_OUT - 1) for i in range(HELD_OUT)]
    ids = torch.tensor(numpy.stack([tokens[at : at + CONTEXT + 1].astype(numpy.int64) for at in begins]))
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)).item()


def random_model(bits, tied):
    """Large weights, so that every path matters."""
    torch.manual_seed(bits + tied)
    config = transformers.GPT2Config(vocab_size=VOCABULARIES[bits], n_positions=POSITIONS, n_embd=24, n_layer=3, n_head=4,
                                     tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def same_tensors(a, b):
    a, b = (safetensors.numpy.load_file(os.path.join(name, "model.safetensors")) for name in (a, b))
    a, b = ({name.removeprefix("transformer."): value for name, value in one.items()} for one in (a, b))
    return a.keys() == b.keys() and all(numpy.array_equal(a[name], b[name]) for name in a)


def opens(tokens, bits, tied):
    what = "%d bits, %s" % (bits, "tied" if tied else "untied")
    model = random_model(bits, tied)
    expected = torch_loss(model, tokens)
    model.save_pretrained(fresh("given"))
    still = ("--open", path("given"), "--steps", "1", "--lr", "0")
    hash, loss = run(*still, "--export", fresh("back"), bits=bits)
    check(abs(loss - expected) < 1e-4, "%s: torch's loss is %.6f, train_gpt's %s %.6f" % (what, expected, hash, loss))
    check(same_tensors(path("given"), path("back")), what + ": opened and exported, the tensors are the same")
    if bits == 16:
        model.save_pretrained(fresh("parts"), max_shard_size="40KB")
        check(os.path.exists(path("parts/model.safetensors.index.json")), what + ": the model is in several files")
        check(run("--open", path("parts"), *still[2:])[0] == hash, what + ": several files are the same model")
        plain = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()
                 if not tied or name != "lm_head.weight"}
        shutil.copytree(path("given"), fresh("plain"))
        safetensors.torch.save_file({name: value.contiguous().clone() for name, value in plain.items()},
                                    path("plain/model.safetensors"))
        check(run("--open", path("plain"), *still[2:])[0] == hash, what + ": names without transformer. are the same model")
    for strategy in ("ddp", "full", "hybrid"):
        check(run(*still, "--ranks", "2", "--strategy", strategy, bits=bits)[0] == hash, "%s: --strategy %s" % (what, strategy))
    check(run(*still, "--strategy", "full", bits=bits, launcher=(dtrun, "-n", "3"))[0] == hash, what + ": on processes")


def exports(tokens, bits, tied):
    what = "%d bits, %s" % (bits, "tied" if tied else "untied")
    flags = ("--open", path("given")) if bits == 16 else \
        ("--vocab", str(VOCABULARIES[bits]), "--layers", "2", "--heads", "2", "--width", "16") + (("--tied",) if tied else ())
    flags += ("--steps", "6", "--lr", "1e-2", "--ranks", "2", "--strategy", "full")
    hash, loss = run(*flags, "--export", fresh("made"), bits=bits)
    model, info = transformers.GPT2LMHeadModel.from_pretrained(path("made"), output_loading_info=True)
    check(not any(info.values()), "%s: transformers finds %s" % (what, info))
    check((model.lm_head.weight is model.transformer.wte.weight) == tied, what + ": the head is tied as it was")
    seen = torch_loss(model, tokens)
    check(abs(seen - loss) < 1e-4, "%s: train_gpt's loss is %.6f, torch's %.6f" % (what, loss, seen))
    saves = ("--save", fresh("run"), "--every", "3")
    run(*flags, *saves, "--until", "3", bits=bits)
    check(run(*flags, *saves, "--resume", bits=bits)[0] == hash, what + ": a run that is resumed is the same")


def refuses(changes, expected):
    with open(path("given/config.json")) as file:
        config = {**json.load(file), **changes}
    shutil.copytree(path("given"), fresh("other"))
    with open(path("other/config.json"), "w") as file:
        json.dump(config, file)
    said = run("--open", path("other"), "--steps", "1")[0]
    check(expected in said, "%s: %s, and not %s" % (changes, expected, said))


rng = numpy.random.default_rng(1)
for bits, vocabulary in VOCABULARIES.items():
    tokens = rng.integers(0, vocabulary, 4000).astype("<u%d" % (bits // 8))
    tokens.tofile(path("tokens%d" % bits))
    for tied in (True, False):
        opens(tokens, bits, tied)
        exports(tokens, bits, tied)
random_model(16, True).save_pretrained(fresh("given"))
refuses({"model_type": "llama"}, '"model_type": "gpt2"')
refuses({"activation_function": "relu"}, "activation_function")
refuses({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon")
refuses({"n_inner": 100}, "n_inner")
refuses({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx")
refuses({"n_head": 5}, "no multiple of n_head")
refuses({"n_layer": -1}, '"n_layer"')
refuses({"n_layer": 4}, "h.3.ln_1.weight")
refuses({"n_layer": 2}, "is none of this model's")
refuses({"n_positions": 25}, "has another shape")
refuses({"n_positions": 8}, "--context 16 is more")
refuses({"tie_word_embeddings": False}, "lm_head.weight")
refuses({"vocab_size": 999, "n_embd": 24}, "has another shape")
check("and the vocabulary has 256" in run("--steps", "1")[0], "a token beyond the vocabulary is refused")
print("%d passed, %d failed" % (passed, failed))
sys.exit(failed > 0)
