/* What tape.c offers to observer.cpp, which is built against the installed torch, and what it gets from there. */

#ifndef LLMDEBUG_NOTES_H
#define LLMDEBUG_NOTES_H

#include "../../core/kernels/tensor.h"

enum { NOTES_VERSION = 2, NO_VERSION = -1 /* of an inference tensor nobody keeps it */, NOT_ASKED = -2 };

/* What torch knows of a tensor on the CPU or on a CUDA device: the tensor, the number of its storage, bytes of that, its offset
   there in elements, its version. */
typedef struct {
    Tensor tensor;
    int64_t storage, room, offset, version;
} Facts;

/* `facts`: 0 if they are filled in, another number if others must find them out. `reserve`: the number of a storage that
   nobody else gets until it is released. Neither raises. */
typedef struct {
    int (*facts)(PyObject *tensor, Facts *out);
    int64_t (*reserve)(PyObject *tensor);
} Torch;

/* Python's lock is held, and no exception is set, when these are called, and when they return.
   `begin`: note an operator, by its object in Python, before it runs; NULL if it can't be noted.
   `end`: note what it left, NULL if it raised, and free what `begin` returned. Returns whether that could be noted.
   `use`: what torch knows, for all tapes; NULL: it is asked through Python. */
typedef struct {
    int version;
    void *(*begin)(PyObject *tape, PyObject *func, PyObject *args, PyObject *kwargs);
    int (*end)(PyObject *tape, void *noted, PyObject *result);
    int (*makes_views)(void *noted);
    void (*use)(const Torch *torch);
} Notes;

#endif
