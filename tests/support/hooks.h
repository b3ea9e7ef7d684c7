/* What a test changes in the library that it links with. All of these are missing until a test defines them; it
 * includes this before dtrain.h. */
#ifndef DTRAIN_TEST_HOOKS_H
#define DTRAIN_TEST_HOOKS_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOOK __attribute__((weak))
void *hook_resize(void *pointer, size_t old_bytes, size_t new_bytes, size_t align) HOOK; /* all memory */
int hook_file_fault(const char *call) HOOK;                  /* the errno that a call ends with; 0: none */
size_t hook_file_limit(const char *call, size_t bytes) HOOK; /* the most that it moves */
uint64_t hook_device_host(int rank) HOOK;                    /* of devices' ranks, which are on one host here */
extern const int hook_file_swap HOOK; /* defined: the machine stores numbers the other way round than files do */
/* Sizes and times that are named here stand in for the library's own. */
extern const size_t hook_block_bytes HOOK, hook_block_alone HOOK, hook_message_chunk HOOK, hook_rounds_piece HOOK,
    hook_server_piece HOOK, hook_layout_small HOOK, hook_layout_home HOOK;
extern const int64_t hook_save_left_ns HOOK;
extern int64_t hook_handshake_ns HOOK;
extern const size_t hook_bounce_bytes HOOK;
extern int hook_isa HOOK; /* the instruction set of all kernels; 0: the library chooses */

#ifdef __cplusplus
}
#endif

#define DTRAIN_RESIZE(user, pointer, old_bytes, new_bytes, align) \
    (hook_resize != NULL ? hook_resize(pointer, old_bytes, new_bytes, align) \
                         : dtrain__memory_resize(pointer, old_bytes, new_bytes, align))
#define DTRAIN__FILE_FAULT(call) (hook_file_fault != NULL ? hook_file_fault(call) : 0)
#define DTRAIN__FILE_LIMIT(call, bytes) (hook_file_limit != NULL ? hook_file_limit(call, bytes) : (bytes))
#define DTRAIN__DEVICE_HOST(rank, host) (hook_device_host != NULL ? hook_device_host(rank) : (host))
#define DTRAIN__FILE_SWAP (&hook_file_swap != NULL || __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__)
#define DTRAIN__TUNED(name, value) (&hook_##name != NULL ? hook_##name : (value))

#endif
