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
   that is none. */
int summarize(int64_t kind, const unsigned char *data, int64_t nbytes, Summary *out);

#endif
