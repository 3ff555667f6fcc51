/* Values that are kept beside their statistics: they are written before the program goes on. Part of tape.c.

   What is in hand is told by its content: values that the dump has need not be written again. Others are written when the
   event that they are of is played, at once, from where they lie. If it can't be played then, as a finalizer has called the
   model within our own work, they are copied. */

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

/* Return the row that describes equal values, borrowed; NULL if there is none. */
static PyObject *known_values(PyObject *contents, const Seen *seen)
{
    if (seen->known)
        return seen->known;
    PyObject *key = content_key(seen), *known = key ? PyDict_GetItemWithError(contents, key) : NULL;
    Py_XDECREF(key);
    return known;
}

/* Take the values of a tensor, unless there are equal ones. `elements`: where they lie packed, in the tensor's memory or in
   the scratch; NULL if that is not known. */
static int take_values(Tape *tape, Seen *seen, PyObject *tensor, unsigned char *elements, int64_t nbytes, int in_tensor)
{
    PyObject *known = known_values(tape->contents, seen);
    if (known) {
        Py_INCREF(seen->known = known);
        return DONE;
    }
    if (PyErr_Occurred() || !elements)
        return PyErr_Occurred() ? FAILED : REFUSED;
    seen->values = in_tensor ? PyMemoryView_FromMemory((char *)elements, nbytes, READ)
                             : PyBytes_FromStringAndSize((char *)elements, nbytes);
    if (in_tensor)
        Py_INCREF(seen->tensor = tensor);
    return seen->values && PyList_Append(tape->fresh, (PyObject *)seen) == 0 ? DONE : FAILED;
}

static void drop_values(Seen *seen)
{
    Py_CLEAR(seen->values);
    Py_CLEAR(seen->tensor);
}

/* Copy values that still wait. Without memory for it they are lost, which their row will say. */
static void copy_values(Seen *seen)
{
    if (seen->values && seen->tensor) {
        PyObject *copy = PyBytes_FromObject(seen->values);
        drop_values(seen);
        seen->values = copy;
        PyErr_Clear();
    }
}

/* An event was noted, or (`done`) could not be: let its values be written, and what has waited for long. Returns FAILED with an exception of the program: the
   handler of a signal raised, say. */
static int play_values(Tape *tape, int done)
{
    PyObject *fresh = tape->fresh, *kind, *value, *trace;
    if (!fresh || (PyList_Size(fresh) == 0 && PyList_Size(tape->events) < MOST_REPEATED))
        return DONE;
    PyErr_Fetch(&kind, &value, &trace);
    fresh = PyList_GetSlice(fresh, 0, PyList_Size(fresh)); /* a finalizer may note more */
    PyList_SetSlice(tape->fresh, 0, PyList_Size(tape->fresh), NULL);
    PyObject *played = fresh && done == DONE ? PyObject_CallNoArgs(tape->play) : nothing();
    if (!played) { /* it takes the place of one that is set */
        Py_XDECREF(kind), Py_XDECREF(value), Py_XDECREF(trace);
        PyErr_Fetch(&kind, &value, &trace);
    }
    for (Py_ssize_t i = 0; fresh && i < PyList_Size(fresh); i++)
        copy_values((Seen *)PyList_GetItem(fresh, i));
    PyErr_Clear();
    PyErr_Restore(kind, value, trace);
    Py_XDECREF(fresh);
    Py_XDECREF(played);
    return played ? DONE : FAILED;
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
    if (!(tape->fresh = PyList_New(0)))
        return NULL;
    Py_INCREF(tape->contents = given[0]);
    Py_INCREF(tape->play = given[1]);
    Py_RETURN_NONE;
}
