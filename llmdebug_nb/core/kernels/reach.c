/* The largest magnitude in a CPU tensor, in one pass over its memory; nothing is copied.

   Without its sign, the bits of a floating-point number are in the order of the magnitudes, and those of NaN are above
   infinity: the greatest word is the answer, NaN included. Must be called with Python's lock held, as tape.c. */

#include "summary.h"
#include "tensor.h"
#include "values.h"

#include <math.h>

static const double NONE = -1, ASK_TORCH = -2; /* no floating-point elements; not for this function */

typedef uint64_t Most(const unsigned char *data, int64_t count);

#define MOST(NAME, TARGET, WORD, SIGNED)                                                                           \
    TARGET static uint64_t NAME(const unsigned char *data, int64_t count)                                          \
    {                                                                                                              \
        const WORD magnitude = (WORD)-1 >> 1;                                                                      \
        SIGNED most = 0; /* without sign bits: signed comparisons are vectorised everywhere */                     \
        _Pragma("omp simd reduction(max: most)")                                                                   \
        for (int64_t i = 0; i < count; i++) {                                                                      \
            WORD word;                                                                                             \
            memcpy(&word, data + i * (int64_t)sizeof word, sizeof word);                                           \
            const SIGNED bits = (SIGNED)(word & magnitude);                                                        \
            most = bits > most ? bits : most;                                                                      \
        }                                                                                                          \
        return (uint64_t)most;                                                                                     \
    }

#define KERNELS(LEVEL, TARGET)                                                                                     \
    MOST(most16_##LEVEL, TARGET, uint16_t, int16_t)                                                                \
    MOST(most32_##LEVEL, TARGET, uint32_t, int32_t)                                                                \
    MOST(most64_##LEVEL, TARGET, uint64_t, int64_t)                                                                \
    static Most *const kernels_##LEVEL[] = {most32_##LEVEL, most64_##LEVEL, most16_##LEVEL, most16_##LEVEL};

KERNELS(any, )

#if defined(__x86_64__) && defined(__GNUC__)
KERNELS(avx2, __attribute__((target("avx2"))))

static Most *best(int64_t kind)
{
    return (__builtin_cpu_supports("avx2") ? kernels_avx2 : kernels_any)[kind];
}
#else
static Most *best(int64_t kind)
{
    return kernels_any[kind];
}
#endif

/* A dimension that is walked: those of one element, or that repeat the same ones, are none. */
typedef struct {
    int64_t size, stride;
} Dim;

/* Put the dimensions of a tensor in the order of memory, outermost first, and join those that lie in a row. */
static int ordered(const Tensor *t, Dim *dims)
{
    int count = 0, last = 0;
    for (int dim = 0; dim < t->ndim; dim++) {
        if (t->shape[dim] == 1 || t->strides[dim] == 0)
            continue;
        int at = count++;
        for (; at > 0 && dims[at - 1].stride < t->strides[dim]; at--)
            dims[at] = dims[at - 1];
        dims[at] = (Dim){t->shape[dim], t->strides[dim]};
    }
    for (int dim = 1; dim < count; dim++) {
        if (dims[last].stride == dims[dim].size * dims[dim].stride)
            dims[last] = (Dim){dims[last].size * dims[dim].size, dims[dim].stride};
        else
            dims[++last] = dims[dim];
    }
    return count ? last + 1 : 0;
}

/* The greatest word below `count` dimensions. */
static uint64_t walk(const unsigned char *from, const Dim *dims, int count, int64_t item, Most *kernel)
{
    if (count == 0)
        return kernel(from, 1);
    if (count == 1 && dims->stride == 1)
        return kernel(from, dims->size);
    uint64_t most = 0;
    for (int64_t i = 0; i < dims->size; i++) {
        const uint64_t word = walk(from + i * dims->stride * item, dims + 1, count - 1, item, kernel);
        most = word > most ? word : most;
    }
    return most;
}

/* `nbytes`: those of the tensor's storage. Returns the largest magnitude, NONE or ASK_TORCH. */
EXPORT double llmdebug_reach(View *view, void *object, int64_t nbytes)
{
    Tensor t;
    Dim dims[MOST_DIMS];
    if (view(object, &t) != 0)
        return ASK_TORCH; /* with a Python exception set */
    const int64_t kind = kind_of(&t), item = t.dtype.bits / 8;
    if (kind > BF16)
        return NONE;
    if (t.device.type != CPU || kind < 0 || t.ndim > MOST_DIMS || t.data == NULL)
        return ASK_TORCH;
    int64_t extent = 1;
    for (int dim = 0; dim < t.ndim; dim++) {
        if (t.shape[dim] <= 0 || t.strides[dim] < 0)
            return ASK_TORCH;
        extent += (t.shape[dim] - 1) * t.strides[dim];
    }
    if (extent * item > nbytes)
        return ASK_TORCH; /* its memory was freed, as FSDP does */
    const int count = ordered(&t, dims);
    const uint64_t bits = walk((const unsigned char *)t.data + t.byte_offset, dims, count, item, best(kind));
    switch (kind) {
    case F64:
        return double_value(bits);
    case F32:
        return single_value((uint32_t)bits);
    case F16:
        return half_value((uint32_t)bits << 16);
    default:
        return single_value((uint32_t)bits << 16);
    }
}
