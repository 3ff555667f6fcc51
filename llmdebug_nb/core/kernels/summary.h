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

/* The same for elements that come in parts. All parts but the last are whole blocks: then the figures are those of one pass. */
enum { SUM_BLOCK = 1 << 14 };

/* What was found in some elements. `sum`, `squares`: 0 if those of each block were kept. */
typedef struct {
    double low, high, sum, squares;
    int64_t nan, inf, zero;
} Part;

typedef struct {
    int64_t count;
    Part part;
} Tally;

/* Add elements to a tally, which is all zero at first. Returns 0, or -1 for a kind that is none. */
int tally(int64_t kind, const unsigned char *data, int64_t nbytes, Tally *so_far);

/* Return the figures of all elements; at least one was added. */
Summary tallied(const Tally *all);

/* Find the L2 norm and the largest magnitude of each of some rows, of a kind that is one. `to`: room for two of each. */
void size_rows(int64_t kind, const unsigned char *data, int64_t rows, int64_t width, float *to);

#endif
