/* ---- >>begin ----
 * What opens the implementation: every system header, so that none follows a DTRAIN__EXACT_BEGIN. A program that makes
 * the API static uses some of it: what it leaves unused is no reason to warn, up to >>end. */
#ifndef DTRAIN__BEGIN
#define DTRAIN__BEGIN
#include "base.h"

/* Terms of the implementation that the field has no common name for:
 *
 *   bell      a word that threads sleep on; whoever changes what others may wait for rings it (an eventcount)
 *   end       one rank's share of a group
 *   plane     the table of what a group's transport knows beside moving bytes: its control plane
 *   origin    what the groups that come of one world share in this process, such as their service thread
 *   slot      where a rank posts the call that it is in, for peers that read its buffers in place; see >>shared
 *   work      a call in the queue of its group, whose caller may hold a handle of it
 *   hub       the control plane of one process of several; one rank's hub, the leader's, relays for the others
 *   channel   a group's share of a hub; it has a peer for each member, and lanes, the connections to that
 *   mux       what shares a transport of the user's own between groups; a group's share of it is a lane; see >>mux
 *   council   one process's part in the store of its world and in votes, whatever carries the messages; see >>council
 *   consent   a vote of the ranks of a group that are left, and what was decided */

#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

/* Those of vector instructions stand in >>isa. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <ifaddrs.h>
#include <limits.h>
#include <locale.h>
#include <math.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#endif
