/* Runs a program on a kernel that lacks what not every machine has: protection keys, memfd_create, moves that leave
 * pages mapped, advice to populate, pipe2, accept4, getrandom, sched_getaffinity, unix and IPv6 sockets.
 *
 *     build/tests/without PROGRAM [ARGS...]
 *
 * A seccomp filter answers those calls as such a kernel does. Ends with 77 where the system has no filters. */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offsetof(struct seccomp_data, field))
#define ANSWER(what) BPF_STMT(BPF_RET | BPF_K, what)
#define ERROR(number) ANSWER(SECCOMP_RET_ERRNO | (number))
/* A call, and one whose argument has a value, or any of some bits: five steps, after which the call is loaded again. */
#define REFUSE(call, number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (call), 0, 1), ERROR(number)
#define REFUSE_IF(call, test, index, value, number) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (call), 0, 4), LOAD(args[index]), \
        BPF_JUMP(BPF_JMP | (test) | BPF_K, (value), 0, 1), ERROR(number), LOAD(nr)

#ifdef __x86_64__
#define ARCHITECTURE AUDIT_ARCH_X86_64
#else
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

static int lack(void)
{
    struct sock_filter steps[] = {
        LOAD(arch),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0),
        ANSWER(SECCOMP_RET_ALLOW),
        LOAD(nr),
#ifdef SYS_pkey_alloc
        REFUSE(SYS_pkey_alloc, EINVAL),
        REFUSE(SYS_pkey_mprotect, EINVAL), /* also for key 0 */
#endif
#ifdef SYS_memfd_create
        REFUSE(SYS_memfd_create, ENOSYS),
#endif
#ifdef SYS_getrandom
        REFUSE(SYS_getrandom, ENOSYS),
#endif
        REFUSE_IF(SYS_pipe2, BPF_JSET, 1, UINT32_MAX, ENOSYS), /* the C library calls it without flags */
        REFUSE(SYS_accept4, ENOSYS),
        REFUSE(SYS_sched_getaffinity, ENOSYS),
        REFUSE_IF(SYS_mremap, BPF_JSET, 3, 4, EINVAL),  /* MREMAP_DONTUNMAP */
        REFUSE_IF(SYS_madvise, BPF_JEQ, 2, 23, EINVAL), /* MADV_POPULATE_WRITE */
        REFUSE_IF(SYS_socket, BPF_JEQ, 0, AF_UNIX, EAFNOSUPPORT),
        REFUSE_IF(SYS_socket, BPF_JEQ, 0, AF_INET6, EAFNOSUPPORT),
        ANSWER(SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof steps / sizeof steps[0], steps};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}
#else
static int lack(void)
{
    errno = ENOSYS;
    return 0;
}
#endif

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: without PROGRAM [ARGS...]\n");
        return 2;
    }
    if (!lack()) {
        perror("no seccomp filter");
        return 77;
    }
    execv(argv[1], argv + 1);
    perror(argv[1]);
    return 127;
}
