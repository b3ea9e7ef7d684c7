import ctypes as C, os, sys
lib = C.CDLL(sys.argv[1])  # python3 ddp.py libdtrain.so DIRECTORY
assert lib.dtrain_version() // 100 == 2  # the structs and numbers below are those of 0.2
P, I, S, U64, TEXT, F32 = C.c_void_p, C.c_int, C.c_size_t, C.c_uint64, C.c_char_p, 18
class Param(C.Structure):
    _fields_ = [("name", TEXT), ("dtype", I), ("shape", S * 8), ("ndim", I), ("stacked", I), ("unit", I),
                ("no_decay", I), ("frozen", I), ("tied", I), ("data", P), ("grad", P), ("part", P),
                ("device", P), ("dense", I)]
class Pieces(C.Structure):
    _fields_ = [("pieces", P), ("count", S), ("name", TEXT), ("copies", I), ("copy", I), ("private", P * 5)]
class State(C.Structure):
    _fields_ = [("step", U64), ("lists", C.POINTER(Pieces)), ("list_count", S), ("seed", U64),
                ("random_index", U64), ("values", P), ("value_count", S)]
class Where(C.Structure):
    _fields_ = [("directory", TEXT), ("keep_last", I), ("local", I), ("no_verify", I), ("no_sync", I),
                ("timeout_ms", C.c_int64), ("allocator", P)]
lib.dtrain_last_error.restype, lib.dtrain_params_pieces.restype = TEXT, Pieces
def call(name, *args):  # ends the process on an error, as DTRAIN_CHECK does
    if getattr(lib, name)(*args) != 0: sys.stderr.write(lib.dtrain_last_error().decode() + "\n"), os._exit(1)
def train(world, user):  # the loss of an example is (w[0] x[0] + w[1] x[1] - 3)^2 / 2
    world, ddp, ckpt, w, g = P(world), P(), P(), (C.c_float * 2)(1, 2), (C.c_float * 2)()
    x = [(1, 2), (4, 0)][lib.dtrain_comm_rank(world)]
    table = Param(b"w", F32, (S * 8)(2), data=C.addressof(w), grad=C.addressof(g))
    call("dtrain_ddp_create", C.byref(ddp), world, C.byref(table), S(1), None)
    for step in range(2):
        call("dtrain_ddp_begin", ddp, 1, C.c_double(1))
        g[:] = [(w[0] * x[0] + w[1] * x[1] - 3) * x[i] for i in range(2)]
        call("dtrain_ddp_reduce", ddp, 0)
        call("dtrain_ddp_finish", ddp, None)  # g is the mean over the ranks
        w[:] = [w[i] - g[i] / 2 for i in range(2)]
    state = State(2, C.pointer(lib.dtrain_params_pieces(C.byref(table), S(1), None)), 1)
    call("dtrain_checkpoint_create", C.byref(ckpt), world, C.byref(Where(sys.argv[2].encode())))
    call("dtrain_checkpoint_save", ckpt, C.byref(state))
    w[:], state.step = (0, 0), 0
    call("dtrain_checkpoint_load", ckpt, C.byref(state), None, None)
    print(f"step {state.step}: {w[0]} {w[1]}\n", end="")
    lib.dtrain_checkpoint_destroy(ckpt), lib.dtrain_ddp_destroy(ddp)
    return 0
call("dtrain_run_threads", 2, C.CFUNCTYPE(I, P, P)(train), None, None)
