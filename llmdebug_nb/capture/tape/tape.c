/* The tape of a thread: what the hooks of modules see, noted by one call of C each while the program waits; and operators,
   see operators.h.

   A tensor is measured where it lies, see also device.h, and becomes a `Seen`; of other leaves the value is kept, or the class. What calls these
   are, and the rows, is found out when the tape is played. Whatever is unusual is refused: `begin` and `end` then return
   False, the tape is as it was, and the caller goes the long way. What a tensor is comes from DLPack's C exchange API, a
   function that torch hands out; no headers of torch are needed. Python's lock is held throughout. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../core/kernels/summary.h"
#include "../../core/kernels/tensor.h"
#include "notes.h"

#include <string.h>
#ifndef _WIN32
#include <pthread.h>
#endif

enum { VERSION = 12 /* as in native.py */ };
enum { REFUSED = 0, DONE = 1, COPIED = 2, FAILED = -1 };
enum { READ = 0x100 /* PyBUF_READ, which 3.10's stable headers lack */ };
enum { SCRATCH = 64 << 10, LARGE = 4 << 10, MANY = 1 << 21 /* as in native.py of the kernels */, KNOWN = 1 << 10, DEPTH = 8, SLOTS = 16, MOST = 4096 };
enum { LONGEST_SHAPE = MOST_DIMS * 22 + 2 };
enum { MOST_SCRATCH = 1 << 20 /* what a second-level cache holds */ };
enum { AT_OFFSET = 20, AT_LOST = 22, AT_ROW_SIZES = 28 }; /* columns of a row, as in columns.py */
enum { MOST_ROWS = 1024 /* as in constants.py */, OF_ROW = 2 * sizeof(float) };
enum { SMALL_WEIGHT = 64 << 10, WORDS = 64, WEIGHTS = 16 << 10 }; /* as in known_weights.py; entries, at 1.4 KB */
static const int64_t ENDLESS = (int64_t)1 << 40; /* elements */

static PyObject *is_neg, *untyped_storage, *nbytes_name, *storage_offset, *cdata, *weak_ref, *zero_text, *enter_name, *exit_name;
static PyObject *version_name, *cpu_text, *update_name, *intdigest_name, *start_name, *stop_name, *step_name;
static PyObject *slot_texts[SLOTS];
static PyTypeObject *seen_type, *tape_type;
static unsigned long generation; /* counts forks: a child does not write on its parent's tape */

static void forked(void)
{
    generation++;
}

/* -- a tensor that was seen ----------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    int64_t kind, ndim, shape[MOST_DIMS], strides[MOST_DIMS], offset;
    uint64_t digest;
    Summary summary;
    PyObject *storage; /* its number */
    PyObject *release; /* gives the number back; NULL if it was not reserved */
    PyObject *names;   /* of the kinds */
    PyObject *page;    /* of a device, NULL on the host: which rows of it hold the summary, once it is read back */
    PyObject *device;  /* its name; NULL on the host */
    int64_t first, length, count;
    PyObject *sizes; /* of its rows, as bytes, see size_rows; NULL if none are wanted */
    /* only where values are kept, see values.h: its elements, or the row in Python that describes equal ones */
    PyObject *values, *known;
} Seen;

static void seen_dealloc(PyObject *object)
{
    Seen *seen = (Seen *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (seen->release) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        Py_XDECREF(PyObject_CallFunctionObjArgs(seen->release, seen->storage, NULL));
        PyErr_Restore(kind, value, trace);
    }
    Py_XDECREF(seen->release);
    Py_XDECREF(seen->storage);
    Py_XDECREF(seen->names);
    Py_XDECREF(seen->page);
    Py_XDECREF(seen->device);
    Py_XDECREF(seen->sizes);
    Py_XDECREF(seen->values);
    Py_XDECREF(seen->known);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* Write the sizes at the end of a buffer of LONGEST_SHAPE characters. Returns where they begin. */
static char *shape_in(const Seen *seen, char *text)
{
    char *at = text + LONGEST_SHAPE;
    *--at = ']';
    for (int64_t dim = seen->ndim - 1; dim >= 0; dim--) {
        for (int64_t size = seen->shape[dim]; size > 0; size /= 10)
            *--at = (char)('0' + size % 10);
        if (dim)
            *--at = ' ', *--at = ',';
    }
    *--at = '[';
    return at;
}

static PyObject *shape_text(const Seen *seen)
{
    char text[LONGEST_SHAPE], *at = shape_in(seen, text);
    return PyUnicode_FromStringAndSize(at, text + sizeof text - at);
}

static PyObject *nothing(void)
{
    Py_INCREF(Py_None);
    return Py_None;
}

enum { PRINT = 21 /* characters */ };

/* Write the fingerprint as it is shown. */
static void print_in(const Seen *seen, char text[PRINT + 1])
{
    memcpy(text, "xxh3:", 6);
    for (int i = 0; i < 16; i++)
        text[5 + i] = "0123456789abcdef"[seen->digest >> (60 - 4 * i) & 15];
    text[PRINT] = 0;
}

/* The columns of a row from the dtype to the fingerprint; of a tensor on a device, dtype and shape alone. */
static PyObject *seen_content(PyObject *object, PyObject *unused)
{
    (void)unused;
    const Seen *seen = (Seen *)object;
    const Summary *s = &seen->summary;
    char print[PRINT + 1];
    print_in(seen, print);
    const int here = seen->page == NULL;
    PyObject *made[] = {
        PyTuple_GetItem(seen->names, seen->kind),
        shape_text(seen),
        here ? PyFloat_FromDouble(s->low) : nothing(),
        here ? PyFloat_FromDouble(s->high) : nothing(),
        here ? PyFloat_FromDouble(s->mean) : nothing(),
        here ? PyFloat_FromDouble(s->norm) : nothing(),
        here ? PyLong_FromLongLong(s->nan) : nothing(),
        here ? PyLong_FromLongLong(s->inf) : nothing(),
        here ? PyLong_FromLongLong(s->zero) : nothing(),
        here ? PyUnicode_FromString(print) : nothing(),
    };
    enum { COUNT = sizeof made / sizeof *made };
    Py_XINCREF(made[0]);
    PyObject *content = PyTuple_New(COUNT);
    int whole = content != NULL;
    for (int i = 0; i < COUNT; i++)
        whole &= made[i] != NULL;
    for (int i = 0; i < COUNT; i++)
        if (whole)
            PyTuple_SetItem(content, i, made[i]);
        else
            Py_XDECREF(made[i]);
    if (!whole)
        Py_CLEAR(content);
    return content;
}

/* Where it lies in its storage, as bytes to compare; native.py makes the same of a tensor. */
typedef struct {
    int64_t offset, kind, ndim, shape[MOST_DIMS], strides[MOST_DIMS];
} Where;

static PyObject *where_it_is(const Seen *seen)
{
    Where where;
    memset(&where, 0, sizeof where);
    where.offset = seen->offset, where.kind = seen->kind, where.ndim = seen->ndim;
    memcpy(where.shape, seen->shape, (size_t)seen->ndim * sizeof *where.shape);
    memcpy(where.strides, seen->strides, (size_t)seen->ndim * sizeof *where.strides);
    return PyBytes_FromStringAndSize((char *)&where, sizeof where);
}

static PyObject *seen_place(PyObject *object, PyObject *unused)
{
    (void)unused;
    return where_it_is((Seen *)object);
}

static PyObject *seen_storage(PyObject *object, void *unused)
{
    (void)unused;
    Py_INCREF(((Seen *)object)->storage);
    return ((Seen *)object)->storage;
}

static PyObject *seen_device(PyObject *object, void *unused)
{
    (void)unused;
    PyObject *device = ((Seen *)object)->device ? ((Seen *)object)->device : cpu_text;
    Py_INCREF(device);
    return device;
}

/* What it was measured to be on a device: a page, the first row in it, the count of rows, that of elements. */
static PyObject *seen_measured(PyObject *object, PyObject *unused)
{
    (void)unused;
    const Seen *seen = (Seen *)object;
    return Py_BuildValue("(OLLL)", seen->page ? seen->page : Py_None, (long long)seen->first, (long long)seen->length,
                         (long long)seen->count);
}

/* Its elements as a buffer, or None. */
static PyObject *seen_values(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *values = ((Seen *)object)->values ? ((Seen *)object)->values : Py_None;
    Py_INCREF(values);
    return values;
}

/* The sizes of its rows as bytes, or None. */
static PyObject *seen_row_sizes(PyObject *object, void *unused)
{
    (void)unused;
    PyObject *sizes = ((Seen *)object)->sizes ? ((Seen *)object)->sizes : Py_None;
    Py_INCREF(sizes);
    return sizes;
}

/* The row that describes equal values, or None. */
static PyObject *seen_known(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyObject *known = ((Seen *)object)->known ? ((Seen *)object)->known : Py_None;
    Py_INCREF(known);
    return known;
}

static PyMethodDef seen_methods[] = {{"content", seen_content, METH_NOARGS, NULL},
                                     {"values", seen_values, METH_NOARGS, NULL},
                                     {"known", seen_known, METH_NOARGS, NULL},
                                     {"place", seen_place, METH_NOARGS, NULL},
                                     {"measured", seen_measured, METH_NOARGS, NULL},
                                     {NULL, NULL, 0, NULL}};
static PyGetSetDef seen_getset[] = {{"storage", seen_storage, NULL, NULL, NULL},
                                    {"device", seen_device, NULL, NULL, NULL},
                                    {"row_sizes", seen_row_sizes, NULL, NULL, NULL},
                                    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot seen_slots[] = {
    {Py_tp_dealloc, seen_dealloc}, {Py_tp_methods, seen_methods}, {Py_tp_getset, seen_getset}, {0, NULL}};
static PyType_Spec seen_spec = {"_tape.Seen", sizeof(Seen), 0, Py_TPFLAGS_DEFAULT, seen_slots};

/* -- the tape ------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t digest;
    int64_t nbytes, kind;
    Summary summary;
    PyObject *sizes; /* as in `Seen` */
} Known;

/* Where a weight lies, or a view of it. */
typedef struct {
    int64_t storage, offset, kind, ndim, shape[MOST_DIMS], strides[MOST_DIMS];
} Place;

/* A weight as it was measured, with a sample of its storage from there on, as in known_weights.py. */
typedef struct {
    int64_t version, sample[2 * WORDS];
    uint64_t digest;
    Summary summary;
} Weight;

typedef struct Device Device;
typedef int Launch(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned of_y, unsigned of_z,
                   unsigned shared, void *stream, void **params, void **extra); /* cuLaunchKernel of CUDA's driver */

typedef struct {
    PyObject_HEAD
    View *view;
    PyObject *tensor, *parameter; /* classes */
    PyObject *plain;              /* a frozenset of classes whose values are leaves */
    PyObject *digest, *digester;  /* of bytes, as an integer; the same, for bytes that come in parts */
    PyObject *threads;            /* returns how many threads torch uses */
    PyObject *release;            /* of a storage's number */
    PyObject *leaves;             /* what finds the leaves of an unusual value */
    PyObject *other;              /* what stands for a leaf of a class that is none of ours */
    PyObject *others;             /* by class */
    PyObject *busy;               /* functions that return what `calm` has, where nobody else watches */
    PyObject *calm;
    PyObject *modes; /* counts the modes that see functions */
    PyObject *unseen; /* the class of a context in which they see none */
    PyObject *names;    /* of kinds */
    PyObject *keywords; /* slots of arguments by keyword */
    PyObject *events;
    unsigned long owner, generation; /* the thread that it is open for; 0: none */
    Py_ssize_t seen;
    Known *known;
    unsigned char *scratch;
    int64_t room; /* bytes of it */
    PyObject *operators, *kinds, *numbers, *lines, *weights, *clock; /* see `watch`; NULL without it */
    int looks_in, looks_out;
    int64_t nodes; /* of autograd, when an operator ran last */
    PyObject *measured; /* by the bytes of a `Place`, those of a `Weight` */
    Device **devices;   /* NULL if tensors on devices are refused, see device.h */
    Launch *launch;
    PyObject *new_page, *new_kernel, *stream, *current, *capturing; /* functions */
    PyObject *placed; /* by the bytes of a `State`, the `Seen` of this root call */
    PyObject *inputs; /* of the operator whose outputs are looked at; borrowed, NULL otherwise */
    int anew;         /* the tensor that is looked at may have changed without a new version */
    PyObject *contents, *play; /* see values.h; NULL if no values are kept */
    int sizes_rows; /* sizes of rows are wanted */
    int packing; /* the scratch is in use: code of the program, such as a finalizer, may run meanwhile and look, too */
} Tape;

/* Call a method without arguments that returns an integer. Returns -1 with an exception if that fails. */
static int64_t ask(PyObject *object, PyObject *name)
{
    PyObject *answer = PyObject_CallMethodObjArgs(object, name, NULL);
    const int64_t number = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return number;
}

/* Return of how many rows of a tensor the sizes are wanted, as core/row_sizes.py does; of weights, which come again and again, none. */
static int64_t count_rows(const Tape *tape, const Seen *seen)
{
    int64_t rows = tape->sizes_rows && seen->kind <= BF16 && seen->ndim > 1;
    for (int64_t dim = 0; dim < seen->ndim - 1 && rows <= MOST_ROWS; dim++)
        rows *= seen->shape[dim];
    if (rows <= 1 || rows > MOST_ROWS || (tape->weights && PyDict_Contains(tape->weights, seen->storage) != 0))
        return 0;
    return rows;
}

/* Measure the elements, and find their digest. Equal ones of some size are measured once. */
static int measure(Tape *tape, Seen *seen, unsigned char *data, int64_t nbytes)
{
    PyObject *bytes = PyMemoryView_FromMemory((char *)data, nbytes, READ);
    PyObject *digest = bytes ? PyObject_CallFunctionObjArgs(tape->digest, bytes, NULL) : NULL;
    seen->digest = digest ? PyLong_AsUnsignedLongLong(digest) : 0;
    Py_XDECREF(bytes);
    Py_XDECREF(digest);
    if (PyErr_Occurred())
        return FAILED;
    const int64_t rows = count_rows(tape, seen);
    Known *known = &tape->known[seen->digest % KNOWN];
    if (nbytes >= LARGE && known->digest == seen->digest && known->nbytes == nbytes && known->kind == seen->kind
        && rows * OF_ROW == (known->sizes ? PyBytes_Size(known->sizes) : 0)) { /* then they are as wide */
        seen->summary = known->summary;
        Py_XINCREF(seen->sizes = known->sizes);
        return DONE;
    }
    int64_t threads = 1;
    if (nbytes >= MANY) {
        PyObject *found = PyObject_CallFunctionObjArgs(tape->threads, NULL);
        threads = found ? PyLong_AsLongLong(found) : 1;
        Py_XDECREF(found);
        if (PyErr_Occurred())
            return FAILED;
    }
    summarize(seen->kind == BOOLS ? UINT8 : seen->kind, data, nbytes, threads, &seen->summary);
    if (rows && !(seen->sizes = PyBytes_FromStringAndSize(NULL, rows * OF_ROW)))
        return FAILED;
    if (rows)
        size_rows(seen->kind, data, rows, seen->shape[seen->ndim - 1], (float *)(void *)PyBytes_AsString(seen->sizes));
    if (nbytes >= LARGE) {
        Py_XDECREF(known->sizes);
        Py_XINCREF(seen->sizes);
        *known = (Known){seen->digest, nbytes, seen->kind, seen->summary, seen->sizes};
    }
    return DONE;
}

static void fill_place(Place *place, const Seen *seen)
{
    memset(place, 0, sizeof *place);
    place->storage = PyLong_AsLongLong(seen->storage), place->offset = seen->offset; /* whose number nobody else can get */
    place->kind = seen->kind, place->ndim = seen->ndim;
    for (int64_t dim = 0; dim < seen->ndim; dim++)
        place->shape[dim] = seen->shape[dim], place->strides[dim] = seen->strides[dim];
}

/* A tensor, the bytes of its storage, and its offset there in elements. */
typedef struct {
    Tensor tensor;
    int64_t room, offset;
} Facts;

enum { NO_VERSION = -1 /* of an inference tensor nobody keeps it */ };

/* Return the version of a tensor. */
static int64_t version_of(PyObject *tensor)
{
    PyObject *version = PyObject_GetAttr(tensor, version_name);
    const int64_t number = version ? PyLong_AsLongLong(version) : NO_VERSION;
    Py_XDECREF(version);
    PyErr_Clear();
    return number;
}

/* Tell whether a tensor is a large weight of the model; then fill in its state now, and the key of its place. */
static int is_weight(Tape *tape, const Seen *seen, PyObject *tensor, const Facts *facts, unsigned char *data, Weight *now,
                     PyObject **key)
{
    Place place;
    if (PyDict_Contains(tape->weights, seen->storage) != 1)
        return 0;
    memset(now, 0, sizeof *now);
    now->version = version_of(tensor);
    const int64_t room = facts->room - facts->offset * (facts->tensor.dtype.bits / 8);
    const int64_t words = room / 8, step = words / WORDS;
    if (now->version == NO_VERSION || words < WORDS)
        return 0;
    for (int64_t i = 0; i * step < words && i < 2 * WORDS; i++)
        memcpy(&now->sample[i], data + 8 * i * step, 8);
    fill_place(&place, seen);
    *key = PyBytes_FromStringAndSize((char *)&place, sizeof place);
    return *key != NULL;
}

/* Look up what a weight is, if its version and the sample agree. */
static int is_known(Tape *tape, PyObject *key, Weight *now)
{
    Weight known;
    PyObject *bytes = PyDict_GetItemWithError(tape->measured, key);
    if (!bytes)
        return 0;
    memcpy(&known, PyBytes_AsString(bytes), sizeof known);
    if (known.version != now->version || memcmp(known.sample, now->sample, sizeof known.sample))
        return 0;
    *now = known;
    return 1;
}

#include "gathering.h"
#include "device.h"
#include "values.h"

/* Find out where a tensor lies. `*object`: its storage; the caller takes the reference. */
static int find_facts(Tape *tape, PyObject *tensor, Facts *facts, PyObject **object)
{
    *object = NULL;
    PyObject *negative = PyObject_CallMethodObjArgs(tensor, is_neg, NULL);
    Py_XDECREF(negative);
    if (negative != Py_False)
        return negative ? REFUSED : FAILED;
    if (tape->view(tensor, &facts->tensor) != 0)
        return FAILED;
    PyObject *storage = *object = PyObject_CallMethodObjArgs(tensor, untyped_storage, NULL);
    facts->room = storage ? ask(storage, nbytes_name) : -1;
    facts->offset = storage ? ask(tensor, storage_offset) : -1;
    return PyErr_Occurred() ? FAILED : DONE;
}

/* Return the number of a storage; reserved, nobody else gets it until it is released. */
static PyObject *storage_number(PyObject *object, int reserved)
{
    return reserved ? PyObject_CallMethodObjArgs(object, weak_ref, NULL) : PyObject_GetAttr(object, cdata);
}

/* See `look`. `object`: the storage, see `find_facts`. */
static int look_at(Tape *tape, Seen *seen, PyObject *tensor, const Facts *facts, PyObject *object, int is_output, int values)
{
    const Tensor *t = &facts->tensor;
    Weight now;
    PyObject *key = NULL;
    const int64_t kind = kind_of(t), item = t->dtype.bits / 8;
    const int there = t->device.type == CUDA && tape->devices;
    const int reserved = is_output || (there && values);
    if ((t->device.type != CPU && (!there || tape->contents)) || kind < 0 || t->ndim > MOST_DIMS || t->data == NULL)
        return REFUSED;
    int64_t numel = 1, reach = 1, packed = 1;
    for (int dim = t->ndim - 1; dim >= 0; dim--) {
        if (t->shape[dim] <= 0 || t->shape[dim] > ENDLESS / numel || t->strides[dim] < 0)
            return REFUSED;
        packed &= t->shape[dim] == 1 || t->strides[dim] == numel;
        numel *= t->shape[dim];
        reach += (t->shape[dim] - 1) * t->strides[dim];
        seen->shape[dim] = t->shape[dim];
        seen->strides[dim] = t->strides[dim];
    }
    seen->kind = kind, seen->ndim = t->ndim;
    const int64_t room = facts->room, offset = seen->offset = facts->offset;
    if ((offset + reach) * item > room)
        return REFUSED; /* its memory was freed, as FSDP does */
    seen->storage = storage_number(object, reserved);
    if (!seen->storage)
        return FAILED;
    if (reserved) {
        Py_INCREF(tape->release);
        seen->release = tape->release;
    }
    if (!values)
        return DONE;
    if (there)
        return measure_there(tape, seen, tensor, t, numel, reach);
    unsigned char *data = (unsigned char *)t->data + t->byte_offset;
    const int64_t nbytes = numel * item;
    const int large = tape->weights && nbytes > SMALL_WEIGHT
                      && is_weight(tape, seen, tensor, facts, data, &now, &key);
    int done = packed || large || nbytes <= MOST_SCRATCH ? DONE : REFUSED; /* torch copies it sooner, in threads */
    if (tape->contents && nbytes > MOST_COPIED && !large)
        done = REFUSED;
    unsigned char *elements = NULL;
    if (large && !tape->anew && !(is_output && is_written(tape, seen)) && is_known(tape, key, &now))
        seen->digest = now.digest, seen->summary = now.summary, done = DONE;
    else if (done == DONE) {
        const int in_strips = large && !tape->contents && nbytes > STRIP;
        elements = in_strips ? NULL : packed_data(tape, data, t, (int)packed, nbytes);
        tape->packing |= elements && elements == tape->scratch;
        done = in_strips  ? measure_in_strips(tape, seen, data, t, (int)packed, nbytes)
               : elements ? measure(tape, seen, elements, nbytes)
                          : REFUSED;
        if (done == DONE && large) {
            now.digest = seen->digest, now.summary = seen->summary;
            PyObject *bytes = PyBytes_FromStringAndSize((char *)&now, sizeof now);
            if (PyDict_Size(tape->measured) >= WEIGHTS)
                PyDict_Clear(tape->measured); /* views of other lengths in each step, say */
            done = bytes && PyDict_SetItem(tape->measured, key, bytes) == 0 ? DONE : FAILED;
            Py_XDECREF(bytes);
        }
    }
    Py_XDECREF(key);
    if (done == DONE && tape->contents)
        done = take_values(tape, seen, packed ? data : elements, nbytes);
    if (elements && elements == tape->scratch)
        tape->packing = 0;
    return done;
}

/* Fill in what a tensor is. The number of an output's storage is reserved, on a device that of an input's, too.
   `values`: they are wanted, not only the place. */
static int look(Tape *tape, Seen *seen, PyObject *tensor, int is_output, int values)
{
    Facts facts;
    PyObject *object;
    int done = find_facts(tape, tensor, &facts, &object);
    if (done == DONE)
        done = look_at(tape, seen, tensor, &facts, object, is_output, values);
    Py_XDECREF(object);
    return done;
}

/* Append a leaf to a list; takes the reference to the value. */
static int append(PyObject *list, PyObject *slot, PyObject *value)
{
    PyObject *leaf = value ? PyTuple_Pack(2, slot ? slot : zero_text, value) : NULL;
    const int done = leaf && PyList_Append(list, leaf) == 0;
    Py_XDECREF(leaf);
    Py_XDECREF(value);
    return done ? DONE : FAILED;
}

static Seen *new_seen(Tape *tape)
{
    Seen *seen = PyObject_New(Seen, seen_type);
    if (seen) {
        seen->storage = seen->release = seen->page = seen->device = seen->sizes = seen->values = seen->known = NULL;
        seen->names = tape->names;
        Py_INCREF(seen->names);
        tape->seen++;
    }
    return seen;
}

static int append_tensor(Tape *tape, PyObject *list, PyObject *slot, PyObject *tensor, int is_output)
{
    Seen *seen = new_seen(tape);
    if (!seen)
        return FAILED;
    const int done = look(tape, seen, tensor, is_output, 1);
    if (done != DONE) {
        Py_DECREF(seen);
        return done;
    }
    return append(list, slot, (PyObject *)seen);
}

static PyObject *inner_slot(PyObject *slot, Py_ssize_t i)
{
    if (slot)
        return PyUnicode_FromFormat("%U.%zd", slot, i);
    if (i < SLOTS) {
        Py_INCREF(slot_texts[i]);
        return slot_texts[i];
    }
    return PyUnicode_FromFormat("%zd", i);
}

/* What is noted of an object of a class that is none of ours: it may be large, and change. Returns a borrowed reference. */
static PyObject *stand_in(Tape *tape, PyObject *kind)
{
    PyObject *known = PyDict_GetItemWithError(tape->others, kind);
    if (known || PyErr_Occurred())
        return known;
    PyObject *made = PyObject_CallFunctionObjArgs(tape->other, kind, NULL);
    const int kept = made ? PyDict_SetItem(tape->others, kind, made) : -1;
    Py_XDECREF(made);
    return kept == 0 ? made : NULL;
}

/* Append the leaves of a value. `slot`: NULL for the whole of a result. */
static int append_leaves(Tape *tape, PyObject *list, PyObject *slot, PyObject *value, int is_output, int depth)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (type == tape->tensor || type == tape->parameter)
        return append_tensor(tape, list, slot, value, is_output);
    const int plain = PySet_Contains(tape->plain, type);
    if (plain) {
        Py_INCREF(value);
        return plain < 0 ? (Py_DECREF(value), FAILED) : append(list, slot, value);
    }
    const int is_tuple = type == (PyObject *)&PyTuple_Type;
    if (is_tuple || type == (PyObject *)&PyList_Type) {
        if (depth == DEPTH)
            return REFUSED;
        int done = DONE;
        if (is_tuple ? !PyTuple_Size(value) : !PyList_Size(value)) {
            PyObject *kept = stand_in(tape, type);
            Py_XINCREF(kept);
            return append(list, slot, kept);
        }
        for (Py_ssize_t i = 0; done == DONE && i < (is_tuple ? PyTuple_Size(value) : PyList_Size(value)); i++) {
            PyObject *part = is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
            Py_XINCREF(part); /* another thread may take it out of the list meanwhile */
            PyObject *name = part ? inner_slot(slot, i) : NULL;
            done = name ? append_leaves(tape, list, name, part, is_output, depth + 1) : FAILED;
            Py_XDECREF(name);
            Py_XDECREF(part);
        }
        return done;
    }
    /* anything else: Python finds the leaves; see `stand_in` */
    PyObject *found = PyObject_CallFunctionObjArgs(tape->leaves, value, slot, NULL);
    int done = found ? DONE : FAILED;
    for (Py_ssize_t i = 0; done == DONE && i < PyList_Size(found); i++) {
        PyObject *leaf = PyList_GetItem(found, i);
        PyObject *name = PyTuple_GetItem(leaf, 0), *part = PyTuple_GetItem(leaf, 1);
        PyObject *kind = (PyObject *)Py_TYPE(part);
        const int is_plain = PySet_Contains(tape->plain, kind);
        if (kind == tape->tensor || kind == tape->parameter)
            done = append_tensor(tape, list, name, part, is_output);
        else if (is_plain < 0 || PyObject_IsInstance(part, tape->tensor))
            done = is_plain < 0 ? FAILED : REFUSED;
        else {
            PyObject *kept = is_plain || PyLong_Check(part) || PyFloat_Check(part) || PyUnicode_Check(part)
                                 ? part
                                 : stand_in(tape, kind);
            Py_XINCREF(kept);
            done = append(list, name, kept);
        }
    }
    Py_XDECREF(found);
    return done;
}

/* Return the slot of an argument by keyword, a new reference. */
static PyObject *slot_of_keyword(Tape *tape, PyObject *name)
{
    PyObject *slot = PyDict_GetItemWithError(tape->keywords, name);
    if (slot) {
        Py_INCREF(slot);
        return slot;
    }
    slot = PyErr_Occurred() ? NULL : PyUnicode_FromFormat("kwargs.%S", name);
    Py_ssize_t size;
    if (slot && (!PyUnicode_AsUTF8AndSize(slot, &size) || PyDict_SetItem(tape->keywords, name, slot) != 0))
        Py_CLEAR(slot); /* half a character of UTF-16, say */
    return slot;
}

static int append_keywords(Tape *tape, PyObject *list, PyObject *kwargs)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    int done = DONE;
    while (done == DONE && PyDict_Next(kwargs, &at, &name, &value)) {
        PyObject *slot = slot_of_keyword(tape, name);
        Py_INCREF(value);
        done = slot ? append_leaves(tape, list, slot, value, 0, 0) : FAILED;
        Py_DECREF(value);
        Py_XDECREF(slot);
    }
    return done;
}

/* Tell whether this thread may write on the tape, and nobody would see or need what we do in it. */
static int is_open(Tape *tape)
{
    if (tape->owner == 0 || tape->owner != PyThread_get_thread_ident() || tape->generation != generation)
        return REFUSED;
    if (tape->seen >= MOST || PyList_Size(tape->events) >= MOST)
        return REFUSED;
    const Py_ssize_t count = PyTuple_Size(tape->busy);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *state = PyObject_CallNoArgs(PyTuple_GetItem(tape->busy, i));
        PyObject *calm = PyTuple_GetItem(tape->calm, i);
        const int is_calm = !state ? FAILED : state == calm ? 1 : PyObject_RichCompareBool(state, calm, Py_EQ);
        Py_XDECREF(state);
        if (is_calm != 1)
            return is_calm;
    }
    return DONE;
}

/* Hide what we do from modes that see functions; those of the dispatcher see none of it. Returns how to end that in
   `context`, NULL if there is no such mode. */
static int hide(Tape *tape, PyObject **context)
{
    PyObject *count = PyObject_CallNoArgs(tape->modes);
    const long modes = count ? PyLong_AsLong(count) : -1;
    Py_XDECREF(count);
    if (modes <= 0)
        return modes < 0 ? FAILED : DONE;
    *context = PyObject_CallNoArgs(tape->unseen);
    PyObject *entered = *context ? PyObject_CallMethodObjArgs(*context, enter_name, NULL) : NULL;
    if (!entered)
        Py_CLEAR(*context);
    Py_XDECREF(entered);
    return *context ? DONE : FAILED;
}

/* End what `hide` began; an exception that is set stays set. */
static void show(PyObject *context)
{
    if (context) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        Py_XDECREF(PyObject_CallMethodObjArgs(context, exit_name, Py_None, Py_None, Py_None, NULL));
        Py_DECREF(context);
        PyErr_Restore(kind, value, trace);
    }
}

/* Forget an error: the long way meets it, too, and reports it. An interrupt comes again when Python goes on. */
static void forget_error(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_SetInterrupt();
    PyErr_Clear();
}

/* Write an event. `leaves`: NULL if the call raised; takes the reference. Returns a new True or False, and no exception but one
   of the program, see values.h. */
static PyObject *finish(Tape *tape, int done, PyObject *context, PyObject *tag, PyObject *is_end, PyObject *leaves)
{
    if (done == DONE) {
        PyObject *event = PyTuple_Pack(3, tag, is_end, leaves ? leaves : Py_None);
        done = event && PyList_Append(tape->events, event) == 0 ? DONE : FAILED;
        Py_XDECREF(event);
    }
    show(context);
    if (done == FAILED)
        forget_error();
    if (done == DONE && play_values(tape, leaves) != DONE)
        done = FAILED;
    Py_XDECREF(leaves);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done == DONE);
}

/* begin(tag, looks, args, kwargs): a call begins. `looks`: its arguments are wanted. */
static PyObject *tape_begin(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    int done = count == 4 && PyTuple_Check(given[2]) && PyDict_Check(given[3]) ? is_open(tape) : REFUSED;
    PyObject *leaves = done == DONE ? PyList_New(0) : NULL, *context = NULL;
    if (done == DONE)
        done = leaves ? hide(tape, &context) : FAILED;
    if (done == DONE && given[1] == Py_True) {
        for (Py_ssize_t i = 0; done == DONE && i < PyTuple_Size(given[2]); i++) {
            PyObject *slot = inner_slot(NULL, i);
            done = slot ? append_leaves(tape, leaves, slot, PyTuple_GetItem(given[2], i), 0, 0) : FAILED;
            Py_XDECREF(slot);
        }
        if (done == DONE)
            done = append_keywords(tape, leaves, given[3]);
    }
    return finish(tape, done, context, given[0], Py_False, leaves);
}

/* end(tag, looks, args, kwargs, result): a call ends. */
static PyObject *tape_end(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    int done = count == 5 ? is_open(tape) : REFUSED;
    PyObject *leaves = NULL, *context = NULL;
    int raised = 0;
    if (done == DONE && given[4] == Py_None) { /* as hooks are told of an exception */
        PyObject *kind, *value, *trace;
        PyErr_GetExcInfo(&kind, &value, &trace);
        raised = kind != NULL && kind != Py_None;
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
    if (done == DONE && !raised) {
        leaves = PyList_New(0);
        done = leaves ? hide(tape, &context) : FAILED;
        if (done == DONE && given[1] == Py_True)
            done = append_leaves(tape, leaves, NULL, given[4], 1, 0);
    }
    return finish(tape, done, context, given[0], Py_True, leaves);
}

#include "operators.h"
#include "packing.h"
#include "playing.h"

/* weigh(weights, measured): recognise large weights, which are read again only if they seem to have changed. `weights`: by
   storage number; `measured`: what they were, by place. Both are shared with others that look. */
static PyObject *tape_weigh(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    if (count != 2 || !PyDict_Check(given[0]) || !PyDict_Check(given[1]) || tape->weights) {
        PyErr_SetString(PyExc_ValueError, "weigh once, with two dictionaries");
        return NULL;
    }
    Py_INCREF(tape->weights = given[0]);
    Py_INCREF(tape->measured = given[1]);
    Py_RETURN_NONE;
}

/* look(tensor, is_output, anew): what a tensor is, or None. `anew`: it may have changed without a new version. */
static PyObject *tape_look(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    PyObject *type = count > 0 ? (PyObject *)Py_TYPE(given[0]) : NULL;
    Seen *seen = type && (type == tape->tensor || type == tape->parameter) ? new_seen(tape) : NULL;
    tape->anew = count > 2 && given[2] == Py_True;
    if (seen && look(tape, seen, given[0], count > 1 && given[1] == Py_True, 1) != DONE)
        Py_CLEAR(seen);
    tape->anew = 0;
    PyErr_Clear();
    return seen ? (PyObject *)seen : nothing();
}

static PyObject *tape_open(PyObject *object, PyObject *unused)
{
    (void)unused;
    Tape *tape = (Tape *)object;
    tape->owner = PyThread_get_thread_ident();
    tape->generation = generation;
    Py_RETURN_NONE;
}

static PyObject *tape_shut(PyObject *object, PyObject *unused)
{
    (void)unused;
    Tape *tape = (Tape *)object;
    tape->owner = 0;
    if (tape->placed)
        PyDict_Clear(tape->placed); /* the numbers of storages are given back */
    give_back_scratch(tape);
    Py_RETURN_NONE;
}

/* take(): the events, which leave the tape: (tag, whether the call ends, its leaves or None if it raised). */
static PyObject *tape_take(PyObject *object, PyObject *unused)
{
    (void)unused;
    Tape *tape = (Tape *)object;
    PyObject *fresh = PyList_New(0), *events = tape->events;
    if (!fresh)
        return NULL;
    tape->events = fresh;
    tape->seen = 0;
    return events;
}

static Py_ssize_t tape_length(PyObject *object)
{
    return PyList_Size(((Tape *)object)->events);
}

static int tape_init(PyObject *object, PyObject *args, PyObject *unused)
{
    (void)unused;
    Tape *tape = (Tape *)object;
    unsigned long long view;
    PyObject *tensor, *parameter, *plain, *digest, *digester, *threads, *release, *leaves, *other, *busy, *calm, *modes, *unseen, *names;
    if (!PyArg_ParseTuple(args, "KOOOOOOOOOO!O!OOO!p", &view, &tensor, &parameter, &plain, &digest, &digester, &threads, &release,
                          &leaves, &other, &PyTuple_Type, &busy, &PyTuple_Type, &calm, &modes, &unseen, &PyTuple_Type,
                          &names, &tape->sizes_rows))
        return -1;
    if (PyTuple_Size(busy) != PyTuple_Size(calm) || PyTuple_Size(names) <= BOOLS || tape->events) {
        PyErr_SetString(PyExc_ValueError, "these make no tape");
        return -1;
    }
    tape->view = (View *)(uintptr_t)view;
    PyObject *kept[] = {tensor, parameter, plain, digest, digester, threads, release, leaves, other, busy, calm, modes, unseen,
                        names};
    PyObject **to[] = {&tape->tensor, &tape->parameter, &tape->plain, &tape->digest, &tape->digester, &tape->threads, &tape->release,
                       &tape->leaves, &tape->other, &tape->busy, &tape->calm,
                       &tape->modes, &tape->unseen, &tape->names};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        Py_INCREF(kept[i]);
        *to[i] = kept[i];
    }
    tape->keywords = PyDict_New();
    tape->others = PyDict_New();
    tape->events = PyList_New(0);
    tape->known = PyMem_Calloc(KNOWN, sizeof(Known));
    tape->scratch = PyMem_Malloc(SCRATCH);
    tape->room = SCRATCH;
    if (!tape->keywords || !tape->others || !tape->events || !tape->known || !tape->scratch) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void tape_dealloc(PyObject *object)
{
    Tape *tape = (Tape *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *all[] = {tape->tensor, tape->parameter, tape->plain, tape->digest, tape->digester, tape->threads, tape->release,
                       tape->leaves, tape->other, tape->busy, tape->calm, tape->modes, tape->unseen, tape->names, tape->keywords, tape->others, tape->events,
                       tape->operators, tape->kinds, tape->numbers, tape->lines, tape->weights, tape->clock, tape->measured,
                       tape->new_page, tape->new_kernel, tape->stream, tape->current, tape->capturing, tape->placed,
                       tape->contents, tape->play};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        Py_XDECREF(all[i]);
    free_devices(tape);
    for (int i = 0; tape->known && i < KNOWN; i++)
        Py_XDECREF(tape->known[i].sizes);
    PyMem_Free(tape->known);
    PyMem_Free(tape->scratch);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef tape_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))tape_begin, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))tape_end, METH_FASTCALL, NULL},
    {"look", (PyCFunction)(void (*)(void))tape_look, METH_FASTCALL, NULL},
    {"weigh", (PyCFunction)(void (*)(void))tape_weigh, METH_FASTCALL, NULL},
    {"watch", (PyCFunction)(void (*)(void))tape_watch, METH_FASTCALL, NULL},
    {"begin_function", (PyCFunction)(void (*)(void))tape_begin_function, METH_FASTCALL, NULL},
    {"end_function", tape_end_function, METH_O, NULL},
    {"note_views", (PyCFunction)(void (*)(void))tape_note_views, METH_FASTCALL, NULL},
    {"devices", (PyCFunction)(void (*)(void))tape_devices, METH_FASTCALL, NULL},
    {"forget", tape_forget, METH_NOARGS, NULL},
    {"keep", (PyCFunction)(void (*)(void))tape_keep, METH_FASTCALL, NULL},
    {"open", tape_open, METH_NOARGS, NULL},
    {"shut", tape_shut, METH_NOARGS, NULL},
    {"take", tape_take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot tape_slots[] = {
    {Py_tp_init, tape_init}, {Py_tp_dealloc, tape_dealloc}, {Py_tp_methods, tape_methods},
    {Py_sq_length, tape_length}, {Py_tp_new, PyType_GenericNew}, {0, NULL}};
static PyType_Spec tape_spec = {"_tape.Tape", sizeof(Tape), 0, Py_TPFLAGS_DEFAULT, tape_slots};

static PyMethodDef functions[] = {{"play", (PyCFunction)(void (*)(void))tape_play, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_tape", NULL, -1, functions, NULL, NULL, NULL, NULL};

/* Make the names that the code above looks up. */
static int make_texts(void)
{
    const char *texts[] = {"is_neg", "untyped_storage", "nbytes", "storage_offset", "_cdata", "_weak_ref", "0", "__enter__",
                           "__exit__", "_version", "cpu", "update", "intdigest", "start", "stop", "step", "f_back", "f_lasti", "tape", "slowly", "note_slowly", "end_slowly",
                           "api", "records", "hand", "packed", "measured", "called", "operators", "scalars", "path", "op", "level",
                           "module", "number", "id", "module_id", "selected", "recorded", "parameters", "name", "wanted",
                           "kept", "noted", "write_frames", "keep_seen", "count_lost", "count_cut_short", "forward", "__dict__", "popleft", "__name__", "before", "view", "root_call", "input", "output", "aten", "", "None"};
    PyObject **names[] = {&is_neg, &untyped_storage, &nbytes_name, &storage_offset, &cdata, &weak_ref, &zero_text, &enter_name,
                          &exit_name, &version_name, &cpu_text, &update_name, &intdigest_name, &start_name, &stop_name, &step_name, &f_back, &f_lasti, &tape_name, &slowly, &note_slowly, &end_slowly,
                          &api_text, &records_name, &hand_name, &packed_name, &measured_name, &called_name, &operators_name, &scalars_name,
                          &path_name, &op_name, &level_name, &module_text, &number_name, &id_name, &module_id_name,
                          &selected_name, &recorded_name, &parameters_name, &name_name, &wanted_name, &kept_name, &noted_name, &write_name, &keep_name, &lose_name, &cut_short_name, &forward_text, &dict_name,
                          &popleft_name, &class_name, &before_name, &view_name, &root_call_name, &input_text, &output_text, &aten_text, &empty_text, &none_text};
    _Static_assert(sizeof texts / sizeof *texts == sizeof names / sizeof *names, "each name has a text");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!*names[i] && !(*names[i] = PyUnicode_InternFromString(texts[i])))
            return FAILED;
    for (int i = 0; i < SLOTS; i++)
        if (!slot_texts[i] && !(slot_texts[i] = PyUnicode_FromFormat("%d", i)))
            return FAILED;
    return DONE;
}

PyMODINIT_FUNC PyInit__tape(void)
{
    if (make_texts() != DONE)
        return NULL;
    PyObject *module = PyModule_Create(&definition), *tape = PyType_FromSpec(&tape_spec);
    PyObject *gate = PyType_FromSpec(&gate_spec);
    seen_type = (PyTypeObject *)PyType_FromSpec(&seen_spec);
    if (!module || !tape || !gate || !seen_type || PyModule_AddObject(module, "Tape", tape) != 0
        || PyModule_AddObject(module, "Gate", gate) != 0 || PyModule_AddIntConstant(module, "version", VERSION) != 0)
        return NULL;
    Py_XDECREF(tape_type);
    tape_type = (PyTypeObject *)tape;
    Py_INCREF(tape_type);
    Py_INCREF(seen_type);
    PyObject *offered = PyCapsule_New((void *)&notes, "_tape.notes", NULL);
    if (PyModule_AddObject(module, "Seen", (PyObject *)seen_type) != 0 || !offered
        || PyModule_AddObject(module, "notes", offered) != 0)
        return NULL;
#ifndef _WIN32
    static int watched;
    if (!watched++)
        pthread_atfork(NULL, NULL, forked);
#endif
    return module;
}
