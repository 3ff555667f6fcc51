/* A look at a small CPU tensor: its elements are copied to where the program can't change them, and described there.

   The tensor is a Python object, and what it is comes from DLPack's C exchange API, a function that torch hands out; so
   this needs neither Python's headers nor torch's. It must be called with Python's lock held. */

#include "summary.h"
#include "tensor.h"

#include <string.h>

enum { NO_ROOM = -1, NOT_FOR_THIS = -2, ALIGN = 8 };

/* `kind`: that of summary.c, or BOOLS. `start`: where the copy begins in the arena's room. */
typedef struct {
    int64_t kind, start, nbytes, ndim, shape[MOST_DIMS];
    Summary summary;
} Look;

typedef struct {
    View *view;
    unsigned char *room;
    int64_t size, used; /* of the room, in bytes */
    Look *looks;
    int64_t most, count; /* looks */
    int64_t largest;     /* bytes of one tensor */
} Arena;

/* Copy the elements below one dimension, in row-major order. Returns where the next ones go. */
static unsigned char *gather(unsigned char *to, const unsigned char *from, const Tensor *t, int dim, int64_t item)
{
    const int64_t size = t->shape[dim], stride = t->strides[dim] * item;
    if (dim < t->ndim - 1) {
        for (int64_t i = 0; i < size; i++)
            to = gather(to, from + i * stride, t, dim + 1, item);
        return to;
    }
    if (stride == item) {
        memcpy(to, from, (size_t)(size * item));
        return to + size * item;
    }
    for (int64_t i = 0; i < size; i++, to += item)
        memcpy(to, from + i * stride, (size_t)item);
    return to;
}

/* `nbytes`: those of the tensor's storage. Returns the number of the look. */
EXPORT int64_t llmdebug_look(Arena *arena, void *object, int64_t nbytes)
{
    Tensor t;
    if (arena->count == arena->most)
        return NO_ROOM;
    if (arena->view(object, &t) != 0)
        return NOT_FOR_THIS; /* with a Python exception set */
    const int64_t kind = kind_of(&t), item = t.dtype.bits / 8;
    if (t.device.type != CPU || kind < 0 || t.ndim > MOST_DIMS || t.data == NULL)
        return NOT_FOR_THIS;
    Look *look = &arena->looks[arena->count];
    int64_t numel = 1, reach = 1, packed = 1;
    for (int dim = t.ndim - 1; dim >= 0; dim--) {
        if (t.shape[dim] <= 0 || t.shape[dim] > arena->largest || t.strides[dim] < 0)
            return NOT_FOR_THIS;
        packed &= t.shape[dim] == 1 || t.strides[dim] == numel;
        numel *= t.shape[dim];
        reach += (t.shape[dim] - 1) * t.strides[dim];
        if (numel * item > arena->largest)
            return NOT_FOR_THIS;
        look->shape[dim] = t.shape[dim];
    }
    if (reach * item > nbytes)
        return NOT_FOR_THIS; /* its memory was freed, as FSDP does */
    const int64_t room = (numel * item + ALIGN - 1) / ALIGN * ALIGN;
    if (arena->used + room > arena->size)
        return NO_ROOM;
    const unsigned char *from = (const unsigned char *)t.data + t.byte_offset;
    unsigned char *to = arena->room + arena->used;
    if (packed)
        memcpy(to, from, (size_t)(numel * item));
    else
        gather(to, from, &t, 0, item);
    look->kind = kind, look->start = arena->used, look->nbytes = numel * item, look->ndim = t.ndim;
    summarize(kind == BOOLS ? UINT8 : kind, to, look->nbytes, &look->summary);
    arena->used += room;
    return arena->count++;
}
