/* What tape.c offers to observer.cpp, which is built against the installed torch. */

#ifndef LLMDEBUG_NOTES_H
#define LLMDEBUG_NOTES_H

enum { NOTES_VERSION = 3 };

/* Python's lock is held, and no exception is set, when these are called, and when they return.
   `begin`: note an operator, by its object in Python, before it runs; NULL if it can't be noted.
   `end`: note what it left, NULL if it raised, and free what `begin` returned. Returns whether that could be noted. */
typedef struct {
    int version;
    void *(*begin)(PyObject *tape, PyObject *func, PyObject *args, PyObject *kwargs);
    int (*end)(PyObject *tape, void *noted, PyObject *result);
    int (*makes_views)(void *noted);
} Notes;

#endif
