#ifndef LLMDEBUG_SUMMARY_H
#define LLMDEBUG_SUMMARY_H

#include <stdint.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

typedef struct {
    double low, high, mean, norm;
    int64_t nan, inf, zero;
} Summary;

/* Describe the elements of a kind in the `nbytes` at an address, aligned or not; at least one. Returns 0, or -1 for a kind
   that is none. `threads`: how many may work on a large tensor; the figures do not depend on it. */
int summarize(int64_t kind, const unsigned char *data, int64_t nbytes, int64_t threads, Summary *out);

#endif
