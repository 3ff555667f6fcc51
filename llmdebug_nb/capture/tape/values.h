/* Values that are kept beside their statistics: they are written before the program goes on. Part of tape.c.

   What is in hand is told by its content: values that the dump has need not be written again. Others are copied as soon as
   they are measured, since code of the program may run before they are written: that of its containers, or a finalizer. The
   event that they are of is then played at once. Large ones go the long way, as nobody expects twice their memory. */

enum { MOST_COPIED = 2 << 20 }; /* bytes: writing as much takes half a millisecond, ten times what the long way costs more */
enum { MOST_REPEATED = 12 }; /* events without new values that wait: about as many frames as wait, see frames.h */

/* Return what tells of equal values, as the recorder does: fingerprint, dtype and shape. */
static PyObject *content_key(const Seen *seen)
{
    char print[PRINT + 1];
    print_in(seen, print);
    PyObject *text = PyUnicode_FromStringAndSize(print, PRINT), *shape = text ? shape_text(seen) : NULL;
    PyObject *key = shape ? PyTuple_Pack(3, text, PyTuple_GetItem(seen->names, seen->kind), shape) : NULL;
    Py_XDECREF(text);
    Py_XDECREF(shape);
    return key;
}

/* Return the row that describes equal values, borrowed; NULL if there is none. One that says neither where they are nor why
   they are lost is being written, or was given up. */
static PyObject *known_values(PyObject *contents, const Seen *seen)
{
    PyObject *known = seen->known, *key = known ? NULL : content_key(seen);
    if (key)
        known = PyDict_GetItemWithError(contents, key);
    Py_XDECREF(key);
    const int says = known && (PyList_GetItem(known, AT_OFFSET) != Py_None || PyList_GetItem(known, AT_LOST) != Py_None);
    return says ? known : NULL;
}

/* Take the values of a tensor, unless there are equal ones. `elements`: where they lie packed; NULL if that is not known. */
static int take_values(Tape *tape, Seen *seen, const unsigned char *elements, int64_t nbytes)
{
    PyObject *known = known_values(tape->contents, seen);
    if (known) {
        Py_INCREF(seen->known = known);
        return DONE;
    }
    if (PyErr_Occurred() || !elements || nbytes > MOST_COPIED)
        return PyErr_Occurred() ? FAILED : REFUSED;
    seen->values = PyBytes_FromStringAndSize((const char *)elements, nbytes);
    return seen->values ? DONE : FAILED;
}

/* Tell whether leaves have values that are to be written. */
static int have_values(PyObject *leaves)
{
    for (Py_ssize_t i = 0; leaves && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyTuple_GetItem(PyList_GetItem(leaves, i), 1);
        if (Py_TYPE(leaf) == seen_type && ((Seen *)leaf)->values)
            return 1;
    }
    return 0;
}

/* An event was noted, with these leaves: let its values be written, and what has waited for long. Returns FAILED with an
   exception of the program: the handler of a signal raised, say. */
static int play_values(Tape *tape, PyObject *leaves)
{
    if (!tape->contents || !(have_values(leaves) || PyList_Size(tape->events) >= MOST_REPEATED))
        return DONE;
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *played = PyObject_CallNoArgs(tape->play);
    if (!played) { /* it takes the place of one that is set */
        Py_XDECREF(kind), Py_XDECREF(value), Py_XDECREF(trace);
        return FAILED;
    }
    Py_DECREF(played);
    PyErr_Restore(kind, value, trace);
    return DONE;
}

/* keep(contents, play): keep the values of tensors on the CPU. `contents`: by what tells of them, the rows that describe those
   which are there. `play()`: records what is on the tape. */
static PyObject *tape_keep(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    if (count != 2 || !PyDict_Check(given[0]) || tape->contents) {
        PyErr_SetString(PyExc_ValueError, "keep once, with a dictionary and a function");
        return NULL;
    }
    Py_INCREF(tape->contents = given[0]);
    Py_INCREF(tape->play = given[1]);
    Py_RETURN_NONE;
}
