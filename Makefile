# make           dtrain.h and dtrain_cuda.h from src/, and every example and tool into build/
# make demo      trains a small GPT on four threads and compares 1, 2, 3 and 4 ranks
# make demo-fsdp trains it sharded: memory, weights and hidden communication of every strategy
# make test      the tests; SAN=address,undefined or SAN=thread builds them under sanitizers, T=shm takes those whose name
#                has it. .ci/run adds what takes other compilers, nvcc or Python
# make check     the short tests, for use while one works
# make soak      the long random runs, MINUTES=n (default 10) of each kind, 200 rounds of killed ranks
#                and 800 of jobs killed while they save
# make fuzz      libFuzzer on what comes over a connection or from a file, MINUTES=n each; installs clang where it must
# make bench     the benchmark table into build/bench.csv
# make cuda      dtrain_cuda.h for every GPU from sm_80 on, and examples/*.cu, by nvcc (NVCC=...); needs no GPU
# make test-cuda the tests of dtrain_cuda.h on a GPU; make test runs them emulated. CUDA_LARGE=1: vectors to 2^28 too;
#                SANITIZER="compute-sanitizer --tool memcheck" (or racecheck, ...): under it
# make install   both headers, the library, dtrain.pc, a CMake config, dtrun, dtrace and safetensors with their man pages
#                below $(DESTDIR)$(PREFIX), /usr/local unless set; LIBDIR=$(PREFIX)/lib64 changes the place of
#                libraries; make uninstall removes them
# make bench-cuda  its kernels as shares of the rate of a copy, collectives and training of ranks that share it, on a GPU
CC ?= cc
CFLAGS ?= -O2
WARN = -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror=implicit-function-declaration
LIBS = -lpthread -lm
# Without it a compiler joins a product and a sum into one operation where the processor has it, and what a program
# computes depends on the machine.
EXACT = -ffp-contract=off
NVCC ?= nvcc
NVCCFLAGS ?= -O2
SAN ?=
MINUTES ?= 10
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

programs = $(patsubst examples/%.c,build/%,$(wildcard examples/*.c)) $(patsubst tools/%.c,build/%,$(wildcard tools/*.c))
test_dir = build/tests$(if $(SAN),-$(subst $(comma),-,$(SAN)))
comma = ,
T ?=
export T
named = $(if $T,$(strip $(foreach test,$1,$(if $(findstring $T,$(notdir $(test))),$(test)))),$1)
test_programs = $(call named,$(patsubst %.c,$(test_dir)/%,$(notdir $(wildcard tests/*/test_*.c)) soak.c))
test_scripts = $(if $(SAN),,$(call named,$(wildcard tests/*/test_*.sh)))
brief_programs = $(filter-out $(addprefix $(test_dir)/,$(shell cat tests/support/long.txt)),$(test_programs))
# the two macros: tests include system headers before dtrain.h, which sets these where 32 bits need them
test_flags = -O2 -D_FILE_OFFSET_BITS=64 -D_TIME_BITS=64 $(if $(SAN),-g1 -fsanitize=$(SAN) -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
private_tests = $(shell grep -l '^.define DTRAIN_IMPLEMENTATION' tests/*/*.c)
own_tests = $(shell grep -l '^.define DTRAIN__' tests/*/test_*.c)

vpath %.c tests/unit tests/fault

all: dtrain.h dtrain_cuda.h $(programs)

dtrain.h: src/order.txt $(shell find src -type f -not -path 'src/cuda/*') tools/amalgamate
	@tools/amalgamate && touch dtrain.h

dtrain_cuda.h: dtrain.h $(shell find src/cuda -type f)
	@tools/amalgamate && touch dtrain_cuda.h

build $(test_dir) build/cuda:
	@mkdir -p $@

build/train_%: examples/train_%.c dtrain.h $(wildcard examples/*.h) | build
	$(CC) -O3 -march=native -fno-math-errno $(EXACT) -I. $< -o $@ $(LIBS)

build/%: examples/%.c dtrain.h $(wildcard examples/*.h) | build
	$(CC) $(CFLAGS) $(EXACT) -I. $< -o $@ $(LIBS)

build/slow_link: examples/train_gpt.c

build/bench: CFLAGS += -fno-math-errno
build/bench: $(wildcard tools/bench_*.h)

build/dtrun: $(wildcard tools/dtrun_*.h)

build/plan: $(wildcard tools/plan_*.h) examples/report.h

build/%: tools/%.c tools/tool.h examples/terminal.h dtrain.h | build
	$(CC) $(CFLAGS) $(EXACT) -I. $< -o $@ $(LIBS)

# What tests link with: the library, and dtrain_cuda.h on its emulation, with their private functions open to tests that
# reach them and with the hooks of tests/support/hooks.h. A test that defines a DTRAIN__ macro has implementations of
# its own. Compilers warn of the library in tests/unit/matrix.sh.
open = $(test_dir)/open

# A header whose declarations are as they were keeps its time, so that an edit of a body compiles no test again.
$(open)/%: % tests/support/open.awk
	@mkdir -p $(open)
	awk -v bodies=0 -f tests/support/open.awk $< >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

$(test_dir)/dtrain.o: dtrain.h tests/support/open.awk tests/support/hooks.h | $(test_dir)
	{ echo '#define DTRAIN_IMPLEMENTATION'; echo '#include "tests/support/hooks.h"'; awk -v bodies=1 -f tests/support/open.awk dtrain.h; } >$(@:.o=.c)
	$(CC) $(test_flags) -w -I. -c $(@:.o=.c) -o $@

$(test_dir)/dtrain_cuda.o: dtrain_cuda.h tests/support/open.awk $(open)/dtrain.h | $(test_dir)
	{ echo '#define DTRAIN_CUDA_EMULATE'; echo '#define DTRAIN_CUDA_IMPLEMENTATION'; awk -v bodies=1 -f tests/support/open.awk dtrain_cuda.h; } >$(@:.o=.c)
	$(CC) $(test_flags) -w -I$(open) -c $(@:.o=.c) -o $@

$(test_dir)/libdtrain.a: $(test_dir)/dtrain.o $(test_dir)/dtrain_cuda.o
	$(AR) rcs $@ $^

$(test_dir)/%.o: %.c $(wildcard tests/support/*.h) $(open)/dtrain.h $(open)/dtrain_cuda.h $(wildcard examples/*) | $(test_dir)
	$(CC) $(subst -O2,-O1,$(test_flags)) $(WARN) $(if $(filter $<,$(own_tests)),,-I$(open)) -I. -Itests/support -c $< -o $@

$(test_dir)/%: $(test_dir)/%.o $(test_dir)/libdtrain.a
	$(CC) $(test_flags) $^ -o $@ $(LIBS)

$(test_dir)/test_plan.o: $(wildcard tools/plan_*.h) tools/tool.h

.PRECIOUS: $(test_dir)/%.o $(open)/%
.DELETE_ON_ERROR:

# No test runs build/bench or build/plan, which take as long to compile as six tests, and tests/unit/test_ranks.sh links
# these examples with the library of the tests: `make` builds them.
elsewhere = bench plan ddp zero1 fsdp checkpoint async_loop mesh local_sgd compress custom_transport
test: $(if $(test_scripts),$(filter-out $(elsewhere:%=build/%),$(programs)) $(test_dir)/without) $(test_programs)
	@sh tests/support/run.sh $(test_dir)

check: $(brief_programs)
	@tools/amalgamate --check
	@LEAVE_OUT=tests/support/long.txt sh tests/support/run.sh $(test_dir)

# Code for the GPUs of today, and PTX for those to come; CUDA knows sm_100 from 12.8 on.
cuda_code = -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=[sm_90,compute_90] \
	$(if $(filter sm_100,$(shell $(NVCC) --list-gpu-code 2>/dev/null)),-gencode=arch=compute_100$(comma)code=sm_100)
# train_gpt_cuda is left out where there is no cuBLAS beside nvcc.
cublas = $(wildcard $(dir $(shell command -v $(firstword $(NVCC)) 2>/dev/null))../include/cublas_v2.h)
no_cublas = build/train_gpt_cuda is left out: $(firstword $(NVCC)) has no cublas_v2.h of cuBLAS in ../include
cuda_examples = $(patsubst examples/%.cu,build/%,$(wildcard examples/*.cu))
cuda_programs = $(if $(cublas),$(cuda_examples),$(filter-out build/train_gpt_cuda,$(cuda_examples)))
cuda_tests = $(patsubst %.c,build/cuda/%,$(notdir $(wildcard tests/*/test_cuda_*.c)))

cuda: build/cuda/dtrain_cuda.o $(cuda_programs)
	@$(if $(cublas),:,echo "$(no_cublas)")

nvcc:
	@command -v $(firstword $(NVCC)) >/dev/null || \
		{ echo "$(NVCC) is not on PATH: this takes the nvcc of NVIDIA's CUDA Toolkit; say NVCC=/where/it/is/nvcc" >&2; exit 1; }

build/cuda/dtrain_cuda.o: dtrain_cuda.h | build/cuda nvcc
	printf '#define DTRAIN_CUDA_IMPLEMENTATION\n#include "dtrain_cuda.h"\n' >build/cuda/dtrain_cuda.cu
	$(NVCC) -std=c++17 $(NVCCFLAGS) $(cuda_code) -Xptxas -warn-spills,-warn-lmem-usage -I. -c build/cuda/dtrain_cuda.cu -o $@

build/train_gpt_cuda: LIBS := -lcublas $(LIBS)

$(cuda_examples): build/%: examples/%.cu dtrain_cuda.h $(wildcard examples/*.h) | build nvcc
	$(NVCC) -std=c++17 $(NVCCFLAGS) $(cuda_code) -Xcompiler $(EXACT) -I. $< -o $@ $(LIBS)

build/bench_cuda: tools/bench_cuda.cu $(wildcard tools/bench_cuda_*.h) dtrain_cuda.h | build nvcc
	$(NVCC) -std=c++17 $(NVCCFLAGS) $(cuda_code) -Xcompiler $(EXACT) -I. $< -o $@ $(LIBS)

build/cuda/libdtrain.a: dtrain.h | build/cuda nvcc
	printf '#define DTRAIN_IMPLEMENTATION\n#include "dtrain.h"\n' >build/cuda/dtrain.c
	$(CC) -O2 -I. -c build/cuda/dtrain.c -o build/cuda/dtrain.o
	$(AR) rcs $@ build/cuda/dtrain.o

$(cuda_tests): build/cuda/%: %.c $(wildcard tests/support/*.h) build/cuda/libdtrain.a dtrain_cuda.h | nvcc
	$(NVCC) -std=c++17 -O1 $(cuda_code) $(if $(filter $<,$(private_tests)),-w) -I. -Itests/support -x cu -c $< -o $@.o
	$(NVCC) $@.o -o $@ build/cuda/libdtrain.a $(LIBS)

# The calls of CUDA that fail are looked at by the tests; processes that they start are looked at too.
SANITIZER ?=
sanitizer = $(if $(SANITIZER),$(SANITIZER) --error-exitcode 9 --target-processes all --report-api-errors no)

test-cuda: $(cuda_tests) $(filter build/train_gpt_cuda,$(cuda_programs))
	@bad=0; for test in $(cuda_tests); do echo "$$test"; $(sanitizer) $$test || bad=1; done; \
	if [ -n "$(cublas)" ]; then echo tests/unit/test_gpt_cuda.sh; \
		GPT_CUDA="$(sanitizer) build/train_gpt_cuda" sh tests/unit/test_gpt_cuda.sh || bad=1; \
	else echo "$(no_cublas)"; fi; exit $$bad

bench-cuda: build/bench_cuda $(filter build/train_gpt_cuda,$(cuda_programs))
	@build/bench_cuda

demo: all
	@sh tools/demo

demo-fsdp: all
	@sh tools/demo_fsdp

bench: all
	@sh tools/bench_table

soak: all $(test_dir)/soak $(test_dir)/steady $(test_dir)/test_property $(test_dir)/test_fault $(test_dir)/test_survive $(test_dir)/test_consent $(test_dir)/test_socket $(test_dir)/test_lost \
	$(test_dir)/test_fsdp_memory $(test_dir)/test_checkpoint_fail $(test_dir)/test_checkpoint_killed $(test_dir)/test_device_table
	COMPILERS="gcc clang" BITS=all sh tests/unit/bits.sh
	$(test_dir)/soak $(MINUTES)
	$(test_dir)/steady $(MINUTES)
	for run in 1 2 3 4 5; do PROPERTY_SEED=$$(date +%s%N) $(test_dir)/test_property || exit 1; done
	FSDP_LAYER_FLOATS=4194304 $(test_dir)/test_fsdp_memory four_processes_grow_as_the_plan_says
	PROPERTY_LARGE=1 $(test_dir)/test_property more_elements_than_32_bits_count
	RACES=all sh tests/fault/races.sh
	COMPILERS="gcc clang" MATRIX=all sh tests/unit/matrix.sh
	MESHES=all sh tests/unit/meshes.sh
	NVCCS=all sh tests/unit/cuda_build.sh
	sh tests/fuzz/fuzz.sh replay
	sh tests/fuzz/fuzz.sh $(MINUTES) "wire member calls"
	DEVICE_FAULTS=all $(test_dir)/test_device_table whatever_call_of_a_device_fails_the_error_comes_back
	FAULT_RUNS=1000 FAULT_SEED=$$(date +%s) $(test_dir)/test_fault
	for test in test_socket test_lost test_survive; do TEST_SEALED=1 $(test_dir)/$$test || exit 1; done
	CONSENT_ROUNDS=1000000 CONSENT_SEED=$$(date +%s) $(test_dir)/test_consent
	KILL_ROUNDS=200 $(test_dir)/test_survive survivors_of_kills_at_random_times_shrink_and_go_on
	CHECKPOINT_ROUNDS=300 CHECKPOINT_SEED=$$(date +%s) $(test_dir)/test_checkpoint_fail
	LOCAL_ROUNDS=100 LOCAL_DELAY_MS=60 CHECKPOINT_SEED=$$(date +%s) $(test_dir)/test_checkpoint_killed
	CROSS=all sh tests/interop/cross.sh
	MPI=all sh tests/interop/mpi.sh

fuzz:
	@sh tests/fuzz/fuzz.sh $(MINUTES)

# One object is in both libraries.
PREFIX ?= /usr/local
soname = libdtrain.so.$(basename $(shell tools/package/version))

build/package/dtrain.o: tools/package/dtrain.c dtrain.h
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(EXACT) -fPIC -fvisibility=hidden -I. -c $< -o $@

build/package/libdtrain.a: build/package/dtrain.o
	rm -f $@ && $(AR) rcs $@ $<

build/package/libdtrain.so: build/package/dtrain.o
	$(CC) $(CFLAGS) $(LDFLAGS) -shared -Wl,-soname,$(soname) -Wl,-z,defs $< -o $@ $(LIBS) -ldl

build/package/%: tools/%.c $(wildcard tools/*.h) examples/terminal.h dtrain.h
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(EXACT) -I. $< -o $@ $(LDFLAGS) $(LIBS)

install: build/package/libdtrain.a build/package/libdtrain.so dtrain_cuda.h $(addprefix build/package/,dtrun dtrace safetensors)
	@PREFIX="$(PREFIX)" LIBDIR="$(LIBDIR)" DESTDIR="$(DESTDIR)" tools/package/install

uninstall:
	@PREFIX="$(PREFIX)" LIBDIR="$(LIBDIR)" DESTDIR="$(DESTDIR)" tools/package/install --remove

# A clone has build/ because of build/.gitignore, which stays.
clean:
	rm -rf build/*

.PHONY: all test nvcc cuda test-cuda bench-cuda demo demo-fsdp bench soak fuzz install uninstall check clean
