"""Builds the wheel: compiles the shared library and writes the module dtrain. The module's constants, structs and
functions are those that dtrain.h declares. Hatchling runs it; see pyproject.toml."""
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCALARS = {"void": None, "char": "c_char", "signed char": "c_byte", "unsigned char": "c_ubyte", "int": "c_int",
           "unsigned": "c_uint", "unsigned int": "c_uint", "float": "c_float", "double": "c_double",
           "size_t": "c_size_t", "uintptr_t": "c_size_t", "int8_t": "c_int8", "uint8_t": "c_uint8",
           "int16_t": "c_int16", "uint16_t": "c_uint16", "int32_t": "c_int32", "uint32_t": "c_uint32",
           "int64_t": "c_int64", "uint64_t": "c_uint64"}
HEAD = '''"""dtrain by ctypes, with the names of dtrain.h. A pointer is a c_void_p, and text is bytes."""
import ctypes
import os

lib = ctypes.CDLL(os.path.join(os.path.dirname(os.path.abspath(__file__)), "libdtrain.so"))
'''


def version():
    with open(os.path.join(ROOT, "dtrain.h"), encoding="utf-8") as header:
        return ".".join(re.findall(r"^#define DTRAIN_VERSION_[MP][A-Z]* (\d+)$", header.read(), re.M))


def declarations(compiler):
    """What dtrain.h itself declares, without what it includes."""
    flags = ["-E", "-DDTRAIN_MPI", "-DDTRAIN_DECLARATIONS_ONLY", "-DDTRAIN_API=DTRAIN_PUBLIC"]
    text = subprocess.run([*compiler, *flags, "dtrain.h"], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                          encoding="utf-8").stdout
    ours, lines = False, []
    for line in text.splitlines():
        mark = re.match(r'# \d+ "(.*?)"', line)
        if mark:
            ours = mark.group(1).endswith("dtrain.h")
        elif ours and not line.startswith("#"):
            lines.append(line)
    return re.sub(r"__attribute__\s*\(\(.*?\)\)\s", " ", re.sub(r"\s+", " ", " ".join(lines)) + " ")


def split(text):
    """The parts between the commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


class Module:
    def __init__(self, text):
        self.lines, self.constants, self.structs, self.enums = [HEAD], {}, [], set()
        self.callbacks = set(re.findall(r"typedef [^;{}()]*\( ?\* ?(\w+) ?\) ?\(", text))
        for kind, tag, body, name in re.findall(r"(enum|struct) (\w*) ?\{((?:[^{}]|\{[^{}]*\})*)\} ?(\w*);", text):
            self.enum(body, name or tag) if kind == "enum" else self.struct(body, name or tag)
        for result, name, arguments in re.findall(r"DTRAIN_PUBLIC ([^();]*?)(\w+) ?\(((?:[^()]|\([^()]*\))*)\);", text):
            self.function(result, name, arguments)

    def enum(self, body, name):
        self.enums.add(name)
        value = -1
        for constant in split(body):
            if constant:
                constant, _, given = (part.strip() for part in constant.partition("="))
                value = eval(given, {}, self.constants) if given else value + 1
                self.constants[constant] = value
                self.lines.append(f"{constant} = {value}")

    def type(self, text):
        """ctypes' name of a type of C, or None for void."""
        text = re.sub(r"\b(const|volatile|struct|enum|extern)\b", " ", text)
        base = " ".join(text.replace("*", " ").split())
        if "(" in text or base in self.callbacks or text.count("*") > 1 or ("*" in text and base != "char"):
            return "ctypes.c_void_p"
        if "*" in text:
            return "ctypes.c_char_p"
        if base in self.structs:
            return base
        if base in self.enums:
            return "ctypes.c_int"
        return SCALARS[base] and "ctypes." + SCALARS[base]

    def struct(self, body, name):
        fields = []
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            base = None
            for part in split(declaration):
                pointer = re.match(r"(.*?)\(\s*\*\s*(\w+)((?:\[[^]]*\])*)\s*\)\s*\(", part)
                if pointer:
                    field, sizes, kind = pointer.group(2), pointer.group(3), "ctypes.c_void_p"
                else:
                    start, field, sizes = re.match(r"(.*?)(\w+)((?:\s*\[[^]]*\])*)$", part).groups()
                    base = start.replace("*", " ") if base is None else base
                    kind = self.type(base + "*" * start.count("*"))
                for size in reversed(re.findall(r"\[([^]]*)\]", sizes)):
                    kind += f" * {eval(size, {}, self.constants)}"
                fields.append(f'("{field}", {kind})')
        self.structs.append(name)
        listed = ",\n                ".join(fields)
        self.lines.append(f"class {name}(ctypes.Structure):\n    _fields_ = [{listed}]")

    def function(self, result, name, arguments):
        kinds, more = [], False
        for argument in split(arguments):
            if argument == "...":
                more = True
            elif argument != "void":
                array = "[" in argument
                bare = re.sub(r"\s*\[[^]]*\]", "", argument)
                bare = bare if "(" in bare else re.sub(r"(?<=[\s*])\w+$", "", bare)
                kinds.append("ctypes.c_void_p" if array else self.type(bare))
        self.lines.append(f"{name} = lib.{name}\n{name}.restype = {self.type(result)}")
        if not more:
            self.lines.append(f"{name}.argtypes = [{', '.join(kinds)}]")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    BuildHookInterface = object


class Wheel(BuildHookInterface):
    def initialize(self, version, build_data):
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        flags = shlex.split(os.environ.get("CFLAGS", "-O2"))
        self.made = tempfile.mkdtemp(prefix="dtrain-wheel-")
        library, module = os.path.join(self.made, "libdtrain.so"), os.path.join(self.made, "__init__.py")
        subprocess.run([*compiler, *flags, "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-shared", "-I.",
                        "tools/package/dtrain.c", "-o", library, "-lpthread", "-lm", "-ldl"], cwd=ROOT, check=True)
        with open(module, "w", encoding="utf-8") as file:
            file.write("\n".join(Module(declarations(compiler)).lines) + "\n")
        build_data["force_include"].update({library: "dtrain/libdtrain.so", module: "dtrain/__init__.py"})
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + re.sub(r"[-.]", "_", sysconfig.get_platform())

    def finalize(self, version, build_data, artifact_path):
        shutil.rmtree(self.made)
