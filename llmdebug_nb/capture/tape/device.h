/* Tensors on CUDA devices: measured there by one launch of a kernel, for which nobody waits. Part of tape.c.

   The kernel and the pages come from Python, see devices.py. What was measured is a page and rows of it, see on_device.py. */

enum { DEVICES = 16 /* and streams */ };
enum { OF_PROGRAM = 1 << 13, MOST_PROGRAMS = 512, BLOCK = 1024 }; /* as in on_device.py */
static const int64_t LARGEST = ((int64_t)1 << 31) - MOST_PROGRAMS * BLOCK; /* elements, likewise */

typedef struct {
    void *function; /* NULL if it can't be had */
    unsigned threads, shared;
    int asked;
} Kernel;

/* A stream of a device. Only that stream writes to its pages. */
struct Device {
    int index;
    long long stream;
    PyObject *page, *name; /* the open page; the device, as text */
    void *rows;
    int64_t used, room;
    Kernel kernels[BOOLS + 1][2][2]; /* of a kind, if elements are packed, if they begin at 16 bytes */
};

/* Where a tensor lies, and its version: what tells it from all others until the root call ends. */
typedef struct {
    Place place;
    int64_t version;
} State;

static void free_devices(Tape *tape)
{
    for (int i = 0; tape->devices && i < DEVICES; i++)
        if (tape->devices[i]) {
            Py_XDECREF(tape->devices[i]->page);
            Py_XDECREF(tape->devices[i]->name);
            PyMem_Free(tape->devices[i]);
        }
    PyMem_Free(tape->devices);
    tape->devices = NULL;
}

/* Find how elements lie: `count / inner` runs of `inner` neighbours, `stride` apart; in any order. Returns 0 if otherwise. */
static int find_runs(const Tensor *t, int64_t count, int64_t *inner, int64_t *stride)
{
    int order[MOST_DIMS], dims = 0, next = 0;
    for (int dim = 0; dim < t->ndim; dim++) {
        if (t->shape[dim] == 1)
            continue;
        int at = dims++;
        for (; at > 0 && t->strides[order[at - 1]] > t->strides[dim]; at--)
            order[at] = order[at - 1];
        order[at] = dim;
    }
    int64_t run = 1, outer = 1;
    for (; next < dims && t->strides[order[next]] == run; next++)
        run *= t->shape[order[next]];
    *inner = run;
    *stride = next < dims ? t->strides[order[next]] : count;
    for (; next < dims && t->strides[order[next]] == *stride * outer; next++)
        outer *= t->shape[order[next]];
    return next == dims;
}

/* Call a function of Python that returns an integer. Returns -1 with an exception if that fails. */
static long long number_of(PyObject *function, PyObject *argument)
{
    PyObject *answer = argument ? PyObject_CallFunctionObjArgs(function, argument, NULL) : PyObject_CallNoArgs(function);
    const long long number = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return number;
}

/* Return a stream of a device with a page that has room for so many rows; NULL if there is none. */
static Device *device_with_room(Tape *tape, int index, long long stream, int64_t rows)
{
    int at = 0;
    while (at < DEVICES && tape->devices[at] && (tape->devices[at]->index != index || tape->devices[at]->stream != stream))
        at++;
    if (at == DEVICES)
        return NULL;
    Device *device = tape->devices[at];
    if (!device) {
        if (!(device = tape->devices[at] = PyMem_Calloc(1, sizeof(Device))))
            return (Device *)PyErr_NoMemory();
        device->index = index, device->stream = stream;
    }
    if (device->page && device->used + rows <= device->room)
        return device;
    PyObject *made = PyObject_CallFunction(tape->new_page, "i", index), *page, *name;
    unsigned long long address;
    long long room;
    if (!made || !PyArg_ParseTuple(made, "OKLU", &page, &address, &room, &name)) {
        Py_XDECREF(made);
        return NULL;
    }
    PyObject *old[] = {device->page, device->name};
    Py_INCREF(page);
    Py_INCREF(name);
    device->page = page, device->name = name;
    device->rows = (void *)(uintptr_t)address, device->used = 0, device->room = room;
    Py_XDECREF(old[0]);
    Py_XDECREF(old[1]);
    Py_DECREF(made);
    return rows <= room ? device : NULL;
}

/* Return the kernel for a kind of elements; NULL if there is none. */
static Kernel *kernel_for(Tape *tape, Device *device, int index, int64_t kind, int packed, int aligned)
{
    Kernel *kernel = &device->kernels[kind][packed][aligned];
    if (!kernel->asked) {
        PyObject *made = PyObject_CallFunction(tape->new_kernel, "iOii", index, PyTuple_GetItem(tape->names, kind), packed, aligned);
        unsigned long long function;
        if (made && PyArg_ParseTuple(made, "KII", &function, &kernel->threads, &kernel->shared))
            kernel->function = (void *)(uintptr_t)function;
        else if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
            Py_XDECREF(made);
            return NULL; /* an interrupt: ask again */
        }
        PyErr_Clear();
        kernel->asked = 1;
        Py_XDECREF(made);
    }
    return kernel->function ? kernel : NULL;
}

/* Launch the kernel for a tensor in a page of its device, and note the rows. */
static int launch(Tape *tape, Seen *seen, const Tensor *t, int64_t count, int64_t reach)
{
    const int index = t->device.id;
    unsigned char *data = (unsigned char *)t->data + t->byte_offset;
    int64_t inner, stride;
    if (count >= LARGEST || reach >= LARGEST || !find_runs(t, count, &inner, &stride))
        return REFUSED;
    const int64_t length = count <= OF_PROGRAM * (int64_t)MOST_PROGRAMS ? (count + OF_PROGRAM - 1) / OF_PROGRAM : MOST_PROGRAMS;
    if (number_of(tape->current, NULL) != index)
        return PyErr_Occurred() ? FAILED : REFUSED;
    PyObject *number = PyLong_FromLong(index);
    const long long stream = number ? number_of(tape->stream, number) : -1;
    Py_XDECREF(number);
    Device *device = PyErr_Occurred() ? NULL : device_with_room(tape, index, stream, length);
    if (!device)
        return PyErr_Occurred() ? FAILED : REFUSED;
    Kernel *kernel = kernel_for(tape, device, index, seen->kind, inner == count, ((uintptr_t)data & 15) == 0);
    if (!kernel)
        return PyErr_Occurred() ? FAILED : REFUSED;
    int32_t given[] = {(int32_t)count, (int32_t)inner, (int32_t)stride, (int32_t)device->used};
    void *none = NULL; /* memory of the kernel's own, which it has not */
    void *params[] = {&data, &device->rows, &given[0], &given[1], &given[2], &given[3], &none, &none, &none, &none};
    if (tape->launch(kernel->function, (unsigned)length, 1, 1, kernel->threads, 1, 1, kernel->shared, (void *)(intptr_t)stream,
                     params, NULL) != 0)
        return REFUSED;
    Py_INCREF(device->page);
    seen->page = device->page;
    seen->first = device->used, seen->length = length, seen->count = count;
    seen->device = device->name;
    Py_INCREF(seen->device);
    device->used += length;
    return DONE;
}

/* Tell whether an operator that has just run may have written to a tensor that it gives. Torch counts a change in place
   only afterwards. */
static int is_written(Tape *tape, const Seen *seen)
{
    if (!tape->inputs)
        return 0;
    if (!tape->looks_in)
        return 1; /* nobody knows its inputs */
    for (Py_ssize_t i = 0; i < PyList_Size(tape->inputs); i++) {
        PyObject *leaf = PyTuple_GetItem(PyList_GetItem(tape->inputs, i), 1);
        if (Py_TYPE(leaf) == seen_type && PyObject_RichCompareBool(((Seen *)leaf)->storage, seen->storage, Py_EQ) != 0)
            return 1;
    }
    return 0;
}

/* Measure a tensor on its device, once in a root call while it stays as it is. */
static int measure_there(Tape *tape, Seen *seen, PyObject *tensor, const Tensor *t, int64_t count, int64_t reach)
{
    State state;
    PyObject *capturing = PyObject_CallNoArgs(tape->capturing);
    Py_XDECREF(capturing);
    if (capturing != Py_False)
        return capturing ? REFUSED : FAILED;
    memset(&state, 0, sizeof state);
    fill_place(&state.place, seen);
    PyObject *key = NULL;
    state.version = version_of(tensor);
    if (state.version != NO_VERSION && !tape->anew && !is_written(tape, seen))
        key = PyBytes_FromStringAndSize((char *)&state, sizeof state);
    const Seen *known = key ? (const Seen *)PyDict_GetItemWithError(tape->placed, key) : NULL;
    int done = known || !PyErr_Occurred() ? DONE : FAILED;
    if (known) {
        Py_INCREF(known->page);
        Py_INCREF(known->device);
        seen->page = known->page, seen->device = known->device;
        seen->first = known->first, seen->length = known->length, seen->count = known->count;
    } else if (done == DONE) {
        done = launch(tape, seen, t, count, reach);
        if (done == DONE && key)
            done = PyDict_SetItem(tape->placed, key, (PyObject *)seen) == 0 ? DONE : FAILED;
    }
    Py_XDECREF(key);
    return done;
}

/* forget(): versions do not tell of what has changed. */
static PyObject *tape_forget(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (((Tape *)object)->placed)
        PyDict_Clear(((Tape *)object)->placed);
    give_back_scratch((Tape *)object);
    Py_RETURN_NONE;
}

/* devices(launch, new_page, new_kernel, stream, current, capturing): tensors on CUDA devices can be measured, too. */
static PyObject *tape_devices(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    const unsigned long long address = count == 6 ? PyLong_AsUnsignedLongLong(given[0]) : 0;
    if (!address || tape->devices) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "devices once, with 6 arguments");
        return NULL;
    }
    tape->placed = PyDict_New();
    tape->devices = PyMem_Calloc(DEVICES, sizeof(Device *));
    if (!tape->placed || !tape->devices)
        return PyErr_NoMemory();
    tape->launch = (Launch *)(uintptr_t)address;
    PyObject **to[] = {&tape->new_page, &tape->new_kernel, &tape->stream, &tape->current, &tape->capturing};
    for (int i = 0; i < 5; i++) {
        Py_INCREF(given[i + 1]);
        *to[i] = given[i + 1];
    }
    Py_RETURN_NONE;
}
