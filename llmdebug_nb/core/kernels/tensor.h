/* A tensor as torch's DLPack function shows it, and the kind of its elements. */

#ifndef LLMDEBUG_TENSOR_H
#define LLMDEBUG_TENSOR_H

#include <stdint.h>

/* From DLPack 1.3 (dlpack.h), whose ABI is stable within a major version. */
typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

enum { CPU = 1, CUDA = 2, MOST_DIMS = 8 };
enum { INTEGER = 0, UNSIGNED = 1, FLOAT = 2, BFLOAT = 4, BOOL = 6 };

typedef int View(void *object, Tensor *out);

enum { F32, F64, F16, BF16, INT8, UINT8 = 8, BOOLS = 12 }; /* the kinds of summary.c, and BOOLS */

static inline int64_t kind_of(const Tensor *t)
{
    const int size = t->dtype.bits == 8 ? 0 : t->dtype.bits == 16 ? 1 : t->dtype.bits == 32 ? 2 : t->dtype.bits == 64 ? 3 : -1;
    if (size < 0 || t->dtype.lanes != 1)
        return -1;
    switch (t->dtype.code) {
    case FLOAT:
        return (int64_t[]){-1, F16, F32, F64}[size];
    case BFLOAT:
        return size == 1 ? BF16 : -1;
    case INTEGER:
        return INT8 + size;
    case UNSIGNED:
        return UINT8 + size;
    case BOOL:
        return size == 0 ? BOOLS : -1;
    default:
        return -1;
    }
}

#endif
