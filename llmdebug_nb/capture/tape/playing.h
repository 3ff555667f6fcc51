/* Playing the tape: the rows of records are packed as MessagePack, as store/waiting.py reads them, with no object for each.

   Part of tape.c. `play` does what player.py does event by event, and stops at one that is unusual: that one is Python's to
   play. It works on Python's own lists and counters, so either goes on where the other has stopped. */

enum { MOST_OPEN = 512, MANY_ROWS = 4096 /* as in rows.py */, SHOWN = 200 /* as in walk.py */ };
enum { COLUMN_COUNT = 29, OF_VALUES = 5 /* columns, from the offset on */ };

static PyObject *records_name, *hand_name, *packed_name, *measured_name, *called_name, *operators_name, *scalars_name, *path_name, *op_name,
    *level_name, *number_name, *id_name, *module_id_name, *selected_name, *recorded_name, *parameters_name, *name_name,
    *kept_name, *noted_name, *write_name, *keep_name, *lose_name, *cut_short_name, *wanted_name, *dict_name, *popleft_name, *class_name, *before_name, *view_name, *root_call_name;
static PyObject *forward_text, *input_text, *output_text, *module_text, *aten_text, *empty_text, *none_text;

/* A call that has not ended. `object`: what Python knows it as; NULL: it does not yet. */
typedef struct {
    PyObject *object, *path, *op, *level, *module, *number, *id, *module_id, *parameters;
    int refs, selected, recorded;
} Call;

/* See `Packing`, `Means`, `Now` and `Counts` in Python. */
typedef struct {
    PyObject *recorder, *producers, *seen, *chains, *values, *contents, *frames, *stored;
} Into;
typedef struct {
    PyObject *storages, *seen, *numbers, *number, *step; /* see `ViewChains.in_c` */
} Chains;
typedef struct {
    PyObject *call_class, *signature, *views, *view, *scalar_text, *argument, *classes, *paths, *modules, *keeps_ids;
} Means;
typedef struct {
    PyObject *waiting, *open_calls, *functions, *counts, *root_call, *root;
} Now;
typedef struct {
    PyObject *numbers, *children, *ids;
} Counts;

/* The rows in hand of a recorder, see rows.py. */
typedef struct {
    PyObject *object, *packed, *measured, *called, *operators, *scalars;
} Hand;

typedef struct {
    Into into;
    Chains chains;
    Means means;
    Now now;
    Counts counts;
    Hand hand;
    Row row, frame;
    int64_t made; /* how many records */
    Call *open[MOST_OPEN], *functions[MOST_OPEN];
    int opened, functions_open, kept; /* `kept`: how many open calls Python has in its list, and still are */
} Play;

static void drop_hand(Hand *hand)
{
    PyObject *all[] = {hand->object, hand->packed, hand->measured, hand->called, hand->operators, hand->scalars};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        Py_XDECREF(all[i]);
}

enum { OBJECTS = 8 }; /* of a call, beside Python's own */

static void objects_of(Call *call, PyObject *to[OBJECTS])
{
    PyObject *all[] = {call->path, call->op, call->level, call->module, call->number, call->id, call->module_id, call->parameters};
    memcpy(to, all, sizeof all);
}

static void drop_call(Call *call)
{
    if (!call || --call->refs > 0)
        return;
    PyObject *all[OBJECTS];
    objects_of(call, all);
    for (int i = 0; i < OBJECTS; i++)
        Py_XDECREF(all[i]);
    Py_XDECREF(call->object);
    PyMem_Free(call);
}

/* Return a call that is the same, but that Python does not know it. */
static Call *same_call(const Call *call)
{
    Call *copy = PyMem_Malloc(sizeof *copy);
    PyObject *all[OBJECTS];
    if (!copy) {
        PyErr_NoMemory();
        return NULL;
    }
    *copy = *call;
    copy->object = NULL, copy->refs = 1;
    objects_of(copy, all);
    for (int i = 0; i < OBJECTS; i++)
        Py_XINCREF(all[i]);
    return copy;
}

static void drop_noted_call(PyObject *capsule)
{
    drop_call(PyCapsule_GetPointer(capsule, NULL));
}

/* Take over the rows that a recorder has in hand, if they are others now: code of Python may have committed those before. It
   may run whenever an object is made, as a finalizer. */
static int take_hand(Play *play)
{
    PyObject *hand = PyObject_GetAttr(play->into.recorder, hand_name);
    if (!hand || hand == play->hand.object) {
        Py_XDECREF(hand);
        return hand ? DONE : FAILED;
    }
    Hand old = play->hand;
    play->hand = (Hand){hand, PyObject_GetAttr(hand, packed_name), PyObject_GetAttr(hand, measured_name),
                        PyObject_GetAttr(hand, called_name), PyObject_GetAttr(hand, operators_name),
                        PyObject_GetAttr(hand, scalars_name)};
    drop_hand(&old);
    const Hand *now = &play->hand;
    return now->packed && now->measured && now->called && now->operators && now->scalars ? DONE : FAILED;
}

/* -- open calls ------------------------------------------------------------------------------------ */

static int attribute_of(PyObject *object, PyObject *name, PyObject **to)
{
    *to = PyObject_GetAttr(object, name);
    return *to ? DONE : FAILED;
}

static int flag_of(PyObject *object, PyObject *name)
{
    PyObject *flag = PyObject_GetAttr(object, name);
    const int is_true = flag ? PyObject_IsTrue(flag) : FAILED;
    Py_XDECREF(flag);
    return is_true;
}

/* Return a call that Python knows. Of one that was opened here, all is noted. */
static Call *known_call(PyObject *object)
{
    PyObject *noted = PyObject_GetAttr(object, noted_name);
    const Call *same = noted && noted != Py_None ? PyCapsule_GetPointer(noted, NULL) : NULL;
    Call *call = same ? same_call(same) : noted == Py_None ? PyMem_Calloc(1, sizeof *call) : NULL;
    Py_XDECREF(noted);
    if (!call)
        return PyErr_Occurred() ? NULL : (Call *)PyErr_NoMemory();
    if (same) {
        Py_INCREF(call->object = object);
        return call;
    }
    call->refs = 1;
    Py_INCREF(call->object = object);
    int done = attribute_of(object, path_name, &call->path);
    done = done == DONE ? attribute_of(object, op_name, &call->op) : done;
    done = done == DONE ? attribute_of(object, level_name, &call->level) : done;
    done = done == DONE ? attribute_of(object, module_text, &call->module) : done;
    done = done == DONE ? attribute_of(object, number_name, &call->number) : done;
    done = done == DONE ? attribute_of(object, id_name, &call->id) : done;
    done = done == DONE ? attribute_of(object, module_id_name, &call->module_id) : done;
    done = done == DONE ? attribute_of(object, parameters_name, &call->parameters) : done;
    call->selected = done == DONE ? flag_of(object, selected_name) : FAILED;
    call->recorded = call->selected >= 0 ? flag_of(object, recorded_name) : FAILED;
    if (call->selected < 0 || call->recorded < 0) {
        drop_call(call);
        return NULL;
    }
    return call;
}

/* Make a call known to Python. No code of Python runs: the handler of a signal could raise in it. */
static int make_known(Play *play, Call *call)
{
    if (call->object)
        return DONE;
    PyObject *object = PyType_GenericNew((PyTypeObject *)play->means.call_class, NULL, NULL);
    PyObject *selected = call->selected ? Py_True : Py_False, *recorded = call->recorded ? Py_True : Py_False;
    PyObject *names[] = {path_name, op_name, level_name, module_text, number_name, root_call_name, id_name, module_id_name,
                         selected_name, recorded_name, parameters_name};
    PyObject *values[] = {call->path, call->op, call->level, call->module, call->number, play->now.root_call, call->id,
                          call->module_id, selected, recorded, call->parameters};
    for (size_t i = 0; object && i < sizeof names / sizeof *names; i++)
        if (PyObject_SetAttr(object, names[i], values[i]) != 0)
            Py_CLEAR(object);
    Call *same = object ? same_call(call) : NULL;
    PyObject *noted = same ? PyCapsule_New(same, NULL, drop_noted_call) : NULL;
    if (same && !noted)
        drop_call(same);
    if (!noted || PyObject_SetAttr(object, noted_name, noted) != 0)
        Py_CLEAR(object);
    Py_XDECREF(noted);
    call->object = object;
    return object ? DONE : FAILED;
}

/* Take over the calls and functions that are open. */
static int take_open(Play *play)
{
    const Py_ssize_t opened = PyList_Size(play->now.open_calls), functions = PyList_Size(play->now.functions);
    if (opened > MOST_OPEN / 2 || functions > MOST_OPEN / 2)
        return REFUSED;
    for (Py_ssize_t i = 0; i < opened; i++) {
        Call *call = known_call(PyList_GetItem(play->now.open_calls, i));
        if (!call)
            return FAILED;
        play->open[play->opened++] = call;
    }
    play->kept = play->opened;
    for (Py_ssize_t i = 0; i < functions; i++) {
        PyObject *object = PyList_GetItem(play->now.functions, i);
        Call *call = NULL;
        for (int j = 0; j < play->opened; j++)
            if (play->open[j]->object == object)
                (call = play->open[j])->refs++;
        if (!call && object != Py_None && !(call = known_call(object)))
            return FAILED;
        play->functions[play->functions_open++] = call;
    }
    return DONE;
}

/* Let Python have what is open now. */
static int give_open(Play *play)
{
    int done = PyList_SetSlice(play->now.open_calls, play->kept, PyList_Size(play->now.open_calls), NULL) == 0 ? DONE : FAILED;
    for (int i = play->kept; i < play->opened && done == DONE; i++)
        done = make_known(play, play->open[i]) == DONE && PyList_Append(play->now.open_calls, play->open[i]->object) == 0 ? DONE
                                                                                                                  : FAILED;
    if (done == DONE)
        done = PyList_SetSlice(play->now.functions, 0, PyList_Size(play->now.functions), NULL) == 0 ? DONE : FAILED;
    for (int i = 0; i < play->functions_open && done == DONE; i++) {
        Call *call = play->functions[i];
        done = call ? make_known(play, call) : DONE;
        if (done == DONE && PyList_Append(play->now.functions, call ? call->object : Py_None) != 0)
            done = FAILED;
    }
    return done;
}

static void drop_all(Play *play)
{
    for (int i = 0; i < play->opened; i++)
        drop_call(play->open[i]);
    for (int i = 0; i < play->functions_open; i++)
        drop_call(play->functions[i]);
    drop_hand(&play->hand);
    PyMem_Free(play->row.bytes);
    PyMem_Free(play->frame.bytes);
}

/* Return a number of a dictionary, 0 if it has none, and put the next one there. */
static PyObject *count_up(PyObject *counts, PyObject *key)
{
    PyObject *known = PyDict_GetItemWithError(counts, key);
    if (!known && PyErr_Occurred())
        return NULL;
    const int64_t number = known ? PyLong_AsLongLong(known) : 0;
    Py_XINCREF(known);
    PyObject *now = known ? known : PyLong_FromLongLong(0), *next = PyLong_FromLongLong(number + 1);
    if (!now || !next || PyDict_SetItem(counts, key, next) != 0)
        Py_CLEAR(now);
    Py_XDECREF(next);
    return now;
}

/* Return the execution id of a call that begins, as `ThreadState.next_id` does. */
static PyObject *next_id(Play *play, PyObject *path, PyObject *level, PyObject *parent)
{
    const int is_module = level == module_text, is_inside = PyUnicode_GetLength(parent) > 0;
    if (!is_inside && is_module && !play->opened && PyUnicode_Compare(path, play->now.root) == 0) {
        Py_INCREF(empty_text);
        return empty_text;
    }
    PyObject *key = PyTuple_Pack(2, parent, level), *number = key ? count_up(play->counts.children, key) : NULL;
    Py_XDECREF(key);
    if (!number)
        return NULL;
    const long long child = PyLong_AsLongLong(number);
    Py_DECREF(number);
    if (!is_module)
        return PyUnicode_FromFormat("%U.%lld", parent, child);
    return is_inside ? PyUnicode_FromFormat("%U_%lld", parent, child) : PyUnicode_FromFormat("%lld", child);
}

/* Open a call inside of those that are open. Returns it; those that are open own it. */
static Call *enter_call(Play *play, PyObject *path, PyObject *op, PyObject *level, PyObject *module)
{
    Call *call = PyMem_Calloc(1, sizeof *call);
    if (!call) {
        PyErr_NoMemory();
        return NULL;
    }
    PyObject *parent = play->opened ? play->open[play->opened - 1]->module_id : empty_text;
    *call = (Call){.refs = 1, .path = path, .op = op, .level = level, .module = module, .parameters = Py_None};
    Py_INCREF(path);
    Py_INCREF(op);
    Py_INCREF(level);
    Py_INCREF(module);
    Py_INCREF(Py_None);
    call->number = count_up(play->counts.numbers, path);
    call->id = call->number ? next_id(play, path, level, parent) : NULL;
    int done = call->id ? DONE : FAILED;
    if (done == DONE && play->means.keeps_ids == Py_True) {
        PyObject *key = PyTuple_Pack(2, path, call->number);
        done = key && PyDict_SetItem(play->counts.ids, key, call->id) == 0 ? DONE : FAILED;
        Py_XDECREF(key);
    }
    if (done != DONE) {
        drop_call(call);
        return NULL;
    }
    Py_INCREF(call->module_id = level == module_text ? call->id : parent);
    play->open[play->opened++] = call;
    return call;
}

/* Close and return the innermost open call of a path, and those that are open in it, which had raised. The caller drops it. */
static Call *leave_call(Play *play, PyObject *path)
{
    int at = play->opened - 1;
    while (at >= 0 && play->open[at]->path != path && PyUnicode_Compare(play->open[at]->path, path) != 0)
        at--;
    if (at < 0)
        return NULL;
    while (play->opened > at + 1)
        drop_call(play->open[--play->opened]);
    play->opened = at;
    play->kept = play->kept < at ? play->kept : at;
    return play->open[at];
}

/* -- rows ------------------------------------------------------------------------------------------ */

/* Append a row to one of the lists in hand; takes the reference. */
static int add_to_hand(Play *play, PyObject **list, PyObject *row)
{
    const int done = row && take_hand(play) == DONE && PyList_Append(*list, row) == 0 ? DONE : FAILED;
    Py_XDECREF(row);
    return done;
}

static int add_call_id(Play *play, const Call *call)
{
    PyObject *row = PyTuple_Pack(4, play->now.root_call, call->path, call->number, call->id);
    return add_to_hand(play, &play->hand.called, row);
}

/* Return the name of the argument that a slot is or is part of, or None; a new reference. */
static PyObject *argument_of(Play *play, PyObject *slot, PyObject *parameters)
{
    if (!PyTuple_Check(parameters) || PyTuple_Size(parameters) == 0)
        return nothing();
    for (int i = 0; i < SLOTS; i++)
        if (slot == slot_texts[i]) {
            PyObject *name = i < PyTuple_Size(parameters) ? PyTuple_GetItem(parameters, i) : Py_None;
            Py_INCREF(name);
            return name;
        }
    return PyObject_CallFunctionObjArgs(play->means.argument, slot, parameters, NULL);
}

/* Tell whether a step is one that a record has, -1 on an error. `Step`: see view_chains.py. */
static int is_recorded(PyObject *step)
{
    return flag_of(step, recorded_name);
}

/* Return the number of a chain of views, the last of which comes first in `way`; a new reference. */
static PyObject *chain_number(Play *play, PyObject *way)
{
    if (PyList_Size(way) == 0)
        return nothing();
    PyObject *chain = PyList_Reverse(way) == 0 ? PyList_AsTuple(way) : NULL;
    PyObject *number = chain ? PyDict_GetItemWithError(play->chains.numbers, chain) : NULL;
    Py_XINCREF(number);
    if (chain && !number && !PyErr_Occurred())
        number = PyObject_CallFunctionObjArgs(play->chains.number, chain, NULL);
    Py_XDECREF(chain);
    return number;
}

/* Collect the views from a step back to one that is recorded. */
static int collect_views(PyObject *step, PyObject *way)
{
    int done = DONE;
    Py_INCREF(step);
    while (done == DONE && step != Py_None) {
        const int ends = is_recorded(step);
        PyObject *view = ends == 0 ? PyObject_GetAttr(step, view_name) : NULL, *before = NULL;
        if (view && (view == Py_None || PyList_Append(way, view) == 0))
            before = PyObject_GetAttr(step, before_name);
        done = ends > 0 || before ? DONE : FAILED;
        Py_XDECREF(view);
        Py_DECREF(step);
        step = before ? before : Py_None;
        if (!before)
            Py_INCREF(Py_None);
    }
    Py_DECREF(step);
    return done;
}

/* Return the number of the views that led to a tensor, or None; a new reference. As `ViewChains.number_of_seen`. */
static PyObject *chain_of(Play *play, const Seen *seen, int is_output)
{
    PyObject *steps = PyDict_Size(play->chains.storages) ? PyDict_GetItemWithError(play->chains.storages, seen->storage) : NULL;
    PyObject *place = steps ? where_it_is(seen) : NULL, *step = place ? PyDict_GetItemWithError(steps, place) : NULL;
    Py_XDECREF(place);
    if (!step)
        return PyErr_Occurred() ? NULL : nothing();
    Py_INCREF(step);
    PyObject *way = PyList_New(0), *number = NULL;
    int done = way ? collect_views(step, way) : FAILED;
    if (done == DONE && is_output)
        done = PyObject_SetAttr(step, recorded_name, Py_True) == 0 ? DONE : FAILED;
    if (done == DONE)
        number = chain_number(play, way);
    Py_XDECREF(way);
    Py_DECREF(step);
    return number;
}

/* Tell whether a step lies on the way back from another one, that one included. */
static int is_on_way(PyObject *wanted, PyObject *step)
{
    Py_INCREF(step);
    while (step != Py_None && step != wanted) {
        const int ends = is_recorded(step);
        PyObject *before = ends == 0 ? PyObject_GetAttr(step, before_name) : ends > 0 ? nothing() : NULL;
        Py_DECREF(step);
        if (!before)
            return FAILED;
        step = before;
    }
    const int is_there = step == wanted;
    Py_DECREF(step);
    return is_there;
}

/* Return a new step. `view`: None at a place where no view led. */
static PyObject *new_step(Play *play, PyObject *before, PyObject *view)
{
    PyObject *step = PyType_GenericNew((PyTypeObject *)play->chains.step, NULL, NULL);
    if (step && (PyObject_SetAttr(step, before_name, before) || PyObject_SetAttr(step, view_name, view)
                 || PyObject_SetAttr(step, recorded_name, view == Py_None ? Py_True : Py_False)))
        Py_CLEAR(step);
    return step;
}

/* Note that a view led from one place of a storage to another. As `ViewChains._add`. */
static int add_step(Play *play, PyObject *steps, PyObject *old, PyObject *new, PyObject *view)
{
    PyObject *before = PyDict_GetItemWithError(steps, old), *fresh = NULL;
    int done = DONE;
    Py_XINCREF(before);
    if (!before && !PyErr_Occurred()) {
        before = new_step(play, Py_None, Py_None);
        done = before && PyDict_SetItem(steps, old, before) == 0 ? DONE : FAILED;
    }
    PyObject *known = before && done == DONE ? PyDict_GetItemWithError(steps, new) : NULL;
    const int is_back = known ? is_on_way(known, before) : 0; /* then it is where it was */
    if (!before || PyErr_Occurred() || is_back < 0)
        done = FAILED;
    else if (!is_back) {
        fresh = new_step(play, before, view);
        done = fresh && PyDict_SetItem(steps, new, fresh) == 0 ? DONE : FAILED;
    }
    Py_XDECREF(fresh);
    Py_XDECREF(before);
    return done;
}

/* Note a view of a tensor. As `ViewChains._add_seen`. */
static int add_view(Play *play, PyObject *view, const Seen *base, PyObject *result)
{
    const Seen *seen = (Seen *)result;
    PyObject *old = where_it_is(base), *new = where_it_is(seen), *steps = NULL;
    int done = old && new ? PyObject_RichCompareBool(old, new, Py_EQ) : FAILED;
    if (done == 0) {
        steps = PyDict_GetItemWithError(play->chains.storages, seen->storage);
        Py_XINCREF(steps);
        if (!steps && !PyErr_Occurred() && (steps = PyDict_New())
            && (PyDict_SetItem(play->chains.storages, seen->storage, steps) || PyList_Append(play->chains.seen, result)))
            Py_CLEAR(steps);
        done = steps ? add_step(play, steps, old, new, view) : FAILED;
    }
    Py_XDECREF(steps);
    Py_XDECREF(old);
    Py_XDECREF(new);
    return done;
}

/* Leave room for figures that a device still has, and note where: waiting_rows.py fills it. No fingerprint follows. */
static void put_room(Row *row)
{
    row->figures = row->size;
    for (int i = 0; i < 4; i++)
        put_float(row, 0);
    for (int i = 0; i < 3; i++)
        put_big_endian(row, 0xd3, (uint64_t)UNKNOWN, 8);
    put_nothing(row);
}

/* Pack the columns from the dtype to the fingerprint. */
static void put_content(Row *row, const Seen *seen)
{
    const Summary *s = &seen->summary;
    char print[PRINT + 1], shape[LONGEST_SHAPE], *at = shape_in(seen, shape);
    put_text(row, PyTuple_GetItem(seen->names, seen->kind));
    put_bytes(row, at, shape + LONGEST_SHAPE - at);
    if (seen->page) {
        put_room(row);
        return;
    }
    print_in(seen, print);
    const double figures[] = {s->low, s->high, s->mean, s->norm};
    for (int i = 0; i < 4; i++)
        put_float(row, figures[i]);
    const int64_t counts[] = {s->nan, s->inf, s->zero};
    for (int i = 0; i < 3; i++)
        put_integer(row, counts[i]);
    put_bytes(row, print, PRINT);
}

/* What a record says beside the tensor. `producer`, `argument`, `chain`: None if it has none. */
typedef struct {
    PyObject *number, *role, *slot, *producer, *argument, *chain;
} Said;

/* Pack the row of a tensor. `known`: the row of equal values; NULL if none are kept. */
static void put_row(Play *play, const Call *call, const Said *said, const Seen *seen, PyObject *known)
{
    Row *row = &play->row;
    row->size = row->failed = 0, row->figures = -1;
    put_big_endian(row, 0xdc, COLUMN_COUNT, 2);
    put_number(row, said->number);
    put_number(row, play->now.root_call);
    put_text(row, call->path);
    put_number(row, call->number);
    PyObject *texts[] = {forward_text, said->role, said->slot, call->op};
    for (int i = 0; i < 4; i++)
        put_text(row, texts[i]);
    put_content(row, seen);
    put_text(row, seen->device ? seen->device : cpu_text);
    put_number(row, said->producer);
    for (int i = 0; i < OF_VALUES; i++) {
        PyObject *value = known ? PyList_GetItem(known, AT_OFFSET + i) : Py_None;
        if (PyUnicode_Check(value))
            put_text(row, value);
        else
            put_number(row, value);
    }
    put_text(row, said->argument);
    put_number(row, said->chain);
    put_nothing(row);
    put_binary(row, known ? PyList_GetItem(known, AT_ROW_SIZES) : seen->sizes ? seen->sizes : Py_None);
}

#include "frames.h"

/* Append the packed row to those in hand. Of a tensor on a device, note where its figures go: see `Hand.measured`. */
static int append_row(Play *play, const Seen *seen)
{
    if (play->row.figures < 0)
        return add_packed(play->hand.packed, &play->row);
    const int64_t place[] = {PyByteArray_Size(play->hand.packed) + play->row.figures, seen->first, seen->length, seen->count};
    PyObject *places = PyDict_GetItemWithError(play->hand.measured, seen->page);
    if (!places && !PyErr_Occurred() && (places = PyByteArray_FromStringAndSize(NULL, 0))) {
        const int kept = PyDict_SetItem(play->hand.measured, seen->page, places);
        Py_DECREF(places); /* the dictionary holds it */
        if (kept != 0)
            return FAILED;
    }
    const Py_ssize_t before = places ? PyByteArray_Size(places) : 0;
    if (!places || PyByteArray_Resize(places, before + (Py_ssize_t)sizeof place) != 0)
        return FAILED;
    memcpy(PyByteArray_AsString(places) + before, place, sizeof place);
    const int done = add_packed(play->hand.packed, &play->row);
    if (done != DONE)
        PyByteArray_Resize(places, before); /* smaller: this can't fail */
    return done;
}

/* Count up an attribute, which is `number` now. Makes no object that could begin a collection. */
static int count_on(PyObject *object, PyObject *name, PyObject *number)
{
    PyObject *next = PyLong_FromLongLong(PyLong_AsLongLong(number) + 1);
    const int done = next && PyObject_SetAttr(object, name, next) == 0 ? DONE : FAILED;
    Py_XDECREF(next);
    return done;
}

/* Add the packed row to those in hand, as the record of a number. No object is made that could begin a collection: code of
   Python would take the same number. */
static int add_row(Play *play, PyObject *number, const Seen *seen)
{
    if (play->row.failed || take_hand(play) != DONE || append_row(play, seen) != DONE) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
        return FAILED;
    }
    play->made++;
    return count_on(play->into.recorder, records_name, number);
}

/* Note that values are not there, whose number of a record is taken; the exception that is set stays set. */
static void cut_short(Play *play)
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    Py_XDECREF(PyObject_CallMethodObjArgs(play->into.values, cut_short_name, NULL));
    PyErr_Clear();
    PyErr_Restore(kind, value, trace);
}

/* Record a tensor whose values are not in the dump yet: they are written first. */
static int add_with_values(Play *play, const Call *call, const Said *said, Seen *seen)
{
    if (count_on(play->into.recorder, records_name, said->number) != DONE) /* code of Python runs now, and may record others */
        return FAILED;
    PyObject *header = frame_header(play, call, said, seen);
    PyObject *known = header ? PyObject_CallMethodObjArgs(play->into.values, keep_name, seen, header, NULL) : NULL;
    int done = FAILED;
    if (known) {
        put_row(play, call, said, seen, known);
        done = !play->row.failed && take_hand(play) == DONE ? append_row(play, seen) : FAILED;
        play->made++;
        Py_CLEAR(seen->values);
    }
    Py_XDECREF(header);
    Py_XDECREF(known);
    if (done != DONE)
        cut_short(play);
    return done;
}

/* Count a record whose values the dump has, and add a frame that says so; or count it as one without. */
static int add_repeated(Play *play, const Call *call, const Said *said, const Seen *seen, PyObject *known)
{
    PyObject *why = PyList_GetItem(known, AT_LOST);
    if (PyList_GetItem(known, AT_OFFSET) == Py_None) {
        PyObject *done = PyObject_CallMethodObjArgs(play->into.values, lose_name, why, NULL);
        Py_XDECREF(done);
        return done ? DONE : FAILED;
    }
    PyObject *kept = PyObject_GetAttr(play->into.values, kept_name);
    const int done = kept && count_on(play->into.values, kept_name, kept) == DONE ? add_frame(play, call, said, seen, known) : FAILED;
    Py_XDECREF(kept);
    return done;
}

/* Record a tensor, as `Recorder.record_seen` does. */
static int add_record(Play *play, const Call *call, PyObject *role, PyObject *slot, PyObject *leaf)
{
    Seen *seen = (Seen *)leaf;
    const int is_output = role == output_text, keeps = play->into.contents != Py_None;
    Said said = {.role = role, .slot = slot};
    PyObject *known = keeps ? known_values(play->into.contents, seen) : NULL;
    Py_XINCREF(known);
    said.argument = PyErr_Occurred() ? NULL : is_output ? nothing() : argument_of(play, slot, call->parameters);
    said.chain = said.argument ? chain_of(play, seen, is_output) : NULL;
    said.number = said.chain ? PyObject_GetAttr(play->into.recorder, records_name) : NULL;
    said.producer = said.number ? PyDict_GetItemWithError(play->into.producers, seen->storage) : NULL;
    int done = said.number && (said.producer || !PyErr_Occurred()) ? DONE : FAILED;
    said.producer = said.producer ? said.producer : Py_None;
    if (done == DONE && keeps && !known) {
        Py_INCREF(said.producer); /* the dictionary may let it go meanwhile */
        done = add_with_values(play, call, &said, seen);
        Py_DECREF(said.producer);
    } else if (done == DONE) {
        put_row(play, call, &said, seen, known);
        done = add_row(play, said.number, seen);
        if (done == DONE && known)
            done = add_repeated(play, call, &said, seen, known);
    }
    if (done == DONE && is_output
        && (PyDict_SetItem(play->into.producers, seen->storage, said.number) || PyList_Append(play->into.seen, leaf)))
        done = FAILED;
    Py_XDECREF(known);
    Py_XDECREF(said.argument);
    Py_XDECREF(said.chain);
    Py_XDECREF(said.number);
    return done;
}

/* Return kind and text of a leaf that is no tensor, as `scalar_text` does. */
static int shown_scalar(Play *play, PyObject *value, PyObject *slot, PyObject **kind, PyObject **text)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    if (value == Py_None) {
        Py_INCREF(*kind = none_text);
        *text = nothing();
        return DONE;
    }
    if (type == (PyObject *)&PyBool_Type || type == (PyObject *)&PyFloat_Type || type == (PyObject *)&PyLong_Type) {
        *text = PyObject_Str(value);
        if (!*text)
            return FAILED;
        if (PyUnicode_GetLength(*text) <= SHOWN) {
            *kind = PyObject_GetAttr(type, class_name);
            return *kind ? DONE : FAILED;
        }
        Py_CLEAR(*text);
    }
    PyObject *both = PyObject_CallFunctionObjArgs(play->means.scalar_text, value, slot, NULL);
    if (!both || !PyTuple_Check(both) || PyTuple_Size(both) != 2) {
        Py_XDECREF(both);
        return FAILED;
    }
    Py_INCREF(*kind = PyTuple_GetItem(both, 0));
    Py_INCREF(*text = PyTuple_GetItem(both, 1));
    Py_DECREF(both);
    return DONE;
}

/* Record the leaves of a call. */
static int add_leaves(Play *play, const Call *call, PyObject *role, PyObject *leaves)
{
    int done = DONE;
    for (Py_ssize_t i = 0; done == DONE && i < PyList_Size(leaves); i++) {
        PyObject *leaf = PyList_GetItem(leaves, i), *slot = PyTuple_GetItem(leaf, 0), *value = PyTuple_GetItem(leaf, 1);
        if (Py_TYPE(value) == seen_type)
            done = add_record(play, call, role, slot, value);
        else {
            PyObject *kind = NULL, *text = NULL;
            done = shown_scalar(play, value, slot, &kind, &text);
            if (done == DONE)
                done = add_to_hand(play, &play->hand.scalars,
                                   PyTuple_Pack(8, play->now.root_call, call->path, call->number, role, slot, kind, text, forward_text));
            Py_XDECREF(kind);
            Py_XDECREF(text);
        }
    }
    return done;
}

/* Record the leaves with which a call has ended, and drop it. `leaves`: None if it raised. */
static int end_call(Play *play, Call *call, PyObject *leaves)
{
    const int done = call && call->recorded && leaves != Py_None ? add_leaves(play, call, output_text, leaves) : DONE;
    drop_call(call);
    return done;
}

/* -- events ---------------------------------------------------------------------------------------- */

/* Return the names of a module's parameters, a new reference. They are known for its class and its own forward. */
static PyObject *parameters_of(Play *play, PyObject *tag, PyObject *module)
{
    PyObject *attributes = PyObject_GetAttr(module, dict_name), *type = (PyObject *)Py_TYPE(module), *found = NULL;
    if (!attributes || !PyDict_Check(attributes)) {
        Py_XDECREF(attributes);
        return PyErr_Occurred() ? NULL : nothing();
    }
    PyObject *own = PyDict_GetItemWithError(attributes, forward_text);
    own = own ? own : Py_None;
    Py_INCREF(own);
    Py_INCREF(type);
    PyObject *known = PyErr_Occurred() ? NULL : PyDict_GetItemWithError(play->means.classes, tag);
    if (known && PyTuple_GetItem(known, 0) == type && PyTuple_GetItem(known, 1) == own)
        Py_INCREF(found = PyTuple_GetItem(known, 2));
    else if (!PyErr_Occurred() && (found = PyObject_CallFunctionObjArgs(play->means.signature, module, NULL))) {
        PyObject *fresh = PyTuple_Pack(3, type, own, found);
        if (!fresh || PyDict_SetItem(play->means.classes, tag, fresh) != 0)
            Py_CLEAR(found);
        Py_XDECREF(fresh);
    }
    Py_DECREF(attributes);
    Py_DECREF(own);
    Py_DECREF(type);
    return found;
}

/* Open the call of a module. */
static int begin_module(Play *play, PyObject *tag, PyObject *path, PyObject *module, PyObject *leaves)
{
    const int selected = flag_of(tag, selected_name), inside = play->opened && play->open[play->opened - 1]->selected;
    PyObject *op = selected >= 0 ? PyObject_GetAttr((PyObject *)Py_TYPE(module), class_name) : NULL;
    Call *call = op ? enter_call(play, path, op, module_text, path) : NULL;
    Py_XDECREF(op);
    int done = call ? add_call_id(play, call) : FAILED;
    if (done != DONE)
        return done;
    call->selected = selected || inside;
    call->recorded = selected && play->means.modules == Py_True;
    PyObject *parameters = call->recorded ? parameters_of(play, tag, module) : nothing();
    if (!parameters)
        return FAILED;
    Py_DECREF(call->parameters);
    call->parameters = parameters;
    return call->recorded && leaves != Py_None ? add_leaves(play, call, input_text, leaves) : DONE;
}

static int play_module(Play *play, PyObject *tag, PyObject *is_end, PyObject *leaves)
{
    PyObject *path = PyObject_GetAttr(tag, path_name), *module = NULL;
    int done = FAILED;
    if (path && is_end == Py_True)
        done = end_call(play, leave_call(play, path), leaves);
    else if (path && (module = PyObject_GetAttr(tag, module_text)))
        done = begin_module(play, tag, path, module, leaves);
    Py_XDECREF(path);
    Py_XDECREF(module);
    return done;
}

/* Return the path of an operator in a module, borrowed. */
static PyObject *path_of(const Means *means, PyObject *module, PyObject *name)
{
    PyObject *inside = PyDict_GetItemWithError(means->paths, module);
    if (!inside && !PyErr_Occurred() && (inside = PyDict_New())) {
        const int kept = PyDict_SetItem(means->paths, module, inside);
        Py_DECREF(inside); /* the dictionary holds it */
        if (kept != 0)
            inside = NULL;
    }
    PyObject *path = inside ? PyDict_GetItemWithError(inside, name) : NULL;
    if (inside && !path && !PyErr_Occurred()) {
        path = PyUnicode_FromFormat("%U/%U", module == Py_None ? empty_text : module, name);
        const int kept = path ? PyDict_SetItem(inside, name, path) : -1;
        Py_XDECREF(path);
        if (kept != 0)
            path = NULL;
    }
    return path;
}

static int add_operator(Play *play, const Call *call, PyObject *stack)
{
    const Call *outer = play->opened > 1 ? play->open[play->opened - 2] : NULL;
    PyObject *row[] = {play->now.root_call, call->path, call->number, forward_text, call->level, call->op, stack,
                       outer ? outer->path : Py_None, outer ? outer->number : Py_None, Py_None, Py_None};
    const int count = sizeof row / sizeof *row;
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        Py_INCREF(row[i]);
        PyList_SetItem(list, i, row[i]);
    }
    return add_to_hand(play, &play->hand.operators, list);
}

/* Open the call of an operator inside of another call. `*call`: NULL if it is only counted. */
static int open_operator(Play *play, PyObject *operator, PyObject *level, Call **call)
{
    const Call *parent = play->open[play->opened - 1];
    PyObject *name = PyObject_GetAttr(operator, name_name);
    const int wanted = name ? flag_of(operator, wanted_name) : FAILED;
    int done = wanted >= 0 ? DONE : FAILED;
    *call = NULL;
    if (wanted == 0) {
        PyObject *id = next_id(play, parent->module == Py_None ? empty_text : parent->module, level, parent->module_id);
        done = id ? DONE : FAILED;
        Py_XDECREF(id);
    } else if (wanted > 0) {
        PyObject *path = path_of(&play->means, parent->module, name);
        *call = path ? enter_call(play, path, name, level, parent->module) : NULL;
        done = *call ? DONE : FAILED;
    }
    if (*call) {
        (*call)->selected = (*call)->recorded = 1;
        Py_DECREF((*call)->parameters);
        (*call)->parameters = PyObject_GetAttr(operator, parameters_name);
        done = (*call)->parameters ? DONE : FAILED;
        if (done == FAILED)
            Py_INCREF((*call)->parameters = Py_None);
    }
    Py_XDECREF(name);
    return done;
}

static int play_operator(Play *play, PyObject *operator, PyObject *stack, PyObject *inputs, PyObject *outputs, PyObject *level)
{
    Call *call;
    int done = open_operator(play, operator, level == Py_None ? aten_text : level, &call);
    if (done == DONE && level != Py_None) {
        play->functions[play->functions_open++] = call;
        if (call)
            call->refs++;
    }
    if (done != DONE || !call)
        return done;
    done = add_operator(play, call, stack);
    if (done == DONE)
        done = add_call_id(play, call);
    if (done == DONE)
        done = add_leaves(play, call, input_text, inputs);
    if (done != DONE || outputs == Py_False)
        return done;
    return end_call(play, leave_call(play, call->path), outputs);
}

static int play_function_end(Play *play, PyObject *outputs)
{
    Call *call = play->functions[--play->functions_open];
    if (!call)
        return DONE;
    drop_call(leave_call(play, call->path));
    return end_call(play, call, outputs);
}

/* Return a view, a new reference. `part`: which one of several it is, or None. */
static PyObject *view_of(Play *play, PyObject *operator, PyObject *source, PyObject *args, PyObject *part)
{
    PyObject *name = PyObject_GetAttr(operator, name_name), *repr = name ? PyObject_Repr(args) : NULL;
    PyObject *key = repr ? PyTuple_Pack(4, name, source, repr, part) : NULL;
    PyObject *view = key ? PyDict_GetItemWithError(play->means.views, key) : NULL;
    Py_XINCREF(view);
    if (key && !view && !PyErr_Occurred()) {
        view = PyObject_CallFunctionObjArgs(play->means.view, operator, source, args, part, NULL);
        if (view && PyDict_SetItem(play->means.views, key, view) != 0)
            Py_CLEAR(view);
    }
    Py_XDECREF(name);
    Py_XDECREF(repr);
    Py_XDECREF(key);
    return view;
}

static int play_views(Play *play, PyObject *operator, PyObject *source, PyObject *args, PyObject *views)
{
    int done = DONE;
    for (Py_ssize_t i = 0; done == DONE && i < PyList_Size(views); i++) {
        PyObject *pair = PyList_GetItem(views, i), *result = PyTuple_GetItem(pair, 1);
        PyObject *part = PyList_Size(views) > 1 ? PyLong_FromSsize_t(i) : nothing();
        PyObject *view = part ? view_of(play, operator, source, args, part) : NULL;
        done = view ? add_view(play, view, (Seen *)PyTuple_GetItem(pair, 0), result) : FAILED;
        Py_XDECREF(part);
        Py_XDECREF(view);
    }
    return done;
}

/* Play an event, if it is plain. */
static int play_event(Play *play, PyObject *event)
{
    PyObject *part[5] = {NULL};
    const Py_ssize_t count = PyTuple_Check(event) ? PyTuple_Size(event) : 0;
    for (Py_ssize_t i = 0; i < count && i < 5; i++)
        part[i] = PyTuple_GetItem(event, i);
    if (play->opened == MOST_OPEN || play->functions_open == MOST_OPEN)
        return REFUSED;
    if (count == 3)
        return play_module(play, part[0], part[1], part[2]);
    if (count == 5)
        return play->opened ? play_operator(play, part[0], part[1], part[2], part[3], part[4]) : REFUSED;
    if (count == 1)
        return play->functions_open ? play_function_end(play, part[0]) : REFUSED;
    if (count != 4)
        return REFUSED;
    return play_views(play, part[0], part[1], part[2], part[3]);
}

/* Take the next event, also with an exception set: whoever asks again must not get the same one. */
static PyObject *next_event(Play *play)
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *event = PyObject_CallMethodObjArgs(play->now.waiting, popleft_name, NULL);
    if (kind) {
        PyErr_Clear();
        PyErr_Restore(kind, value, trace);
    }
    return event;
}

/* Play what waits. `left`: the first event that is Python's to play. */
static int play_waiting(Play *play, PyObject **left)
{
    int ready = take_open(play);
    if (ready == DONE)
        ready = take_hand(play);
    int done = ready == FAILED ? FAILED : DONE;
    if (ready == FAILED)
        Py_XDECREF(next_event(play));
    while (done != FAILED && !*left && play->made < MANY_ROWS && PyObject_Size(play->now.waiting) > 0) {
        PyObject *event = next_event(play);
        done = !event ? FAILED : ready == DONE ? play_event(play, event) : REFUSED;
        if (done == REFUSED)
            *left = event;
        else
            Py_XDECREF(event);
    }
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    if (ready == DONE && give_open(play) != DONE)
        done = FAILED;
    drop_all(play);
    if (kind) {
        PyErr_Clear();
        PyErr_Restore(kind, value, trace);
    }
    return done;
}

/* Take the parts of a tuple, borrowed. */
static int unpack_tuple(PyObject *tuple, PyObject **to, size_t size)
{
    const Py_ssize_t count = (Py_ssize_t)(size / sizeof *to);
    if (!tuple || !PyTuple_Check(tuple) || PyTuple_Size(tuple) != count)
        return FAILED;
    for (Py_ssize_t i = 0; i < count; i++)
        to[i] = PyTuple_GetItem(tuple, i);
    return DONE;
}

/* play(means, now, packing): play what waits. Returns the first event that is Python's to play, or None: all are played, or
   there are many rows. On an error, the event at hand is spent. */
static PyObject *tape_play(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    Play *play = PyMem_Calloc(1, sizeof *play);
    if (!play)
        return PyErr_NoMemory();
    PyObject *left = NULL;
    if (count != 3 || unpack_tuple(given[2], (PyObject **)&play->into, sizeof play->into) != DONE
        || unpack_tuple(play->into.chains, (PyObject **)&play->chains, sizeof play->chains) != DONE
        || unpack_tuple(given[0], (PyObject **)&play->means, sizeof play->means) != DONE
        || unpack_tuple(given[1], (PyObject **)&play->now, sizeof play->now) != DONE
        || unpack_tuple(play->now.counts, (PyObject **)&play->counts, sizeof play->counts) != DONE)
        PyErr_SetString(PyExc_TypeError, "play(means, now, packing)");
    else if (play_waiting(play, &left) == FAILED)
        Py_CLEAR(left);
    else if (!left)
        left = nothing();
    PyMem_Free(play);
    return left;
}
