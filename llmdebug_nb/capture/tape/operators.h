/* Operators on the tape: a dispatch mode in C notes what it runs, the views that it makes, and where the program calls it.

   Part of tape.c. Nothing here runs code of Python, but for `stand_in` once for a class, so that no interrupt and no
   compiler comes between; what would need it goes the long way, which also makes known what was unknown: a kind of operator,
   a line of the program, a call stack. */

enum { PLACES = 8 };                       /* as in call_stacks.py */
enum { ELSEWHERE, MODULE_CALL, RUNNER };   /* what code is, as in call_stacks.py; what is more is the id of code of the program */

static PyObject *f_back, *f_lasti, *tape_name, *slowly, *note_slowly, *end_slowly, *api_text;

/* Return what a dictionary has at an address, borrowed; NULL if there is nothing. */
static PyObject *at_address(PyObject *dict, void *address)
{
    PyObject *key = PyLong_FromVoidPtr(address), *found = key ? PyDict_GetItemWithError(dict, key) : NULL;
    Py_XDECREF(key);
    return found;
}

/* Find the innermost places of the program, as ids of code and instructions in it, at most `most`. `inside`: how many of
   them lie within the last module call. Returns how many there are, or -1 if a code is unknown. Gives new references. */
static int places_here(Tape *tape, PyObject **places, int most, int *inside)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    int count = 0, done = DONE;
    *inside = 0;
    Py_XINCREF(frame);
    while (frame && frame != Py_None && done == DONE && count < most) {
        PyCodeObject *code = PyFrame_GetCode((PyFrameObject *)frame);
        PyObject *known = at_address(tape->kinds, code), *back = NULL;
        const long long kind = known ? PyLong_AsLongLong(known) : -1;
        Py_DECREF(code);
        if (kind < 0)
            done = REFUSED;
        else if (kind > RUNNER) {
            PyObject *instruction = PyObject_GetAttr(frame, f_lasti);
            if (instruction) {
                Py_INCREF(known);
                places[2 * count] = known, places[2 * count + 1] = instruction, count++;
            } else
                done = FAILED;
        } else if (kind == MODULE_CALL)
            *inside = *inside ? *inside : count;
        else if (kind == RUNNER)
            break;
        if (done == DONE && !(back = PyObject_GetAttr(frame, f_back)))
            done = FAILED;
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    while (done != DONE && count > 0)
        count--, Py_DECREF(places[2 * count]), Py_DECREF(places[2 * count + 1]);
    *inside = *inside ? *inside : count;
    return done == DONE ? count : -1;
}

/* Look up the call stack's number, or with `innermost` the text of its innermost line. Returns a new reference. */
static int look_around(Tape *tape, int innermost, PyObject **found)
{
    PyObject *places[2 * PLACES];
    int inside = 0;
    *found = NULL;
    if (tape->kinds == Py_None) {
        *found = innermost ? PyUnicode_FromString("") : Py_None;
        if (!innermost)
            Py_INCREF(Py_None);
        return *found ? DONE : FAILED;
    }
    const int count = places_here(tape, places, innermost ? 1 : PLACES, &inside);
    if (count < 0)
        return PyErr_Occurred() ? FAILED : REFUSED;
    PyObject *first = innermost ? NULL : PyLong_FromLong(inside);
    PyObject *key = innermost || first ? PyTuple_New(innermost ? 2 * count : 1 + 2 * count) : NULL;
    if (key && first)
        PyTuple_SetItem(key, 0, first);
    else
        Py_XDECREF(first);
    for (int i = 0; i < 2 * count; i++)
        if (key)
            PyTuple_SetItem(key, i + !innermost, places[i]);
        else
            Py_DECREF(places[i]);
    PyObject *known = NULL;
    if (key && innermost && count == 0)
        *found = PyUnicode_FromString("");
    else if (key) {
        known = PyDict_GetItemWithError(innermost ? tape->lines : tape->numbers, key);
        *found = known && innermost ? PyTuple_GetItem(known, 0) : known;
        Py_XINCREF(*found);
    }
    Py_XDECREF(key);
    return *found ? DONE : PyErr_Occurred() ? FAILED : REFUSED;
}

static int is_tensor(Tape *tape, PyObject *value)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    return type == tape->tensor || type == tape->parameter;
}

/* Tell whether a value, and all in it if it is a list, is a tensor (`tensors`) or plain. */
static int is_all(Tape *tape, PyObject *value, int tensors)
{
    if (!PyList_Check(value) && !PyTuple_Check(value))
        return tensors ? is_tensor(tape, value) : PySet_Contains(tape->plain, (PyObject *)Py_TYPE(value));
    const Py_ssize_t count = PySequence_Size(value);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *part = PyList_Check(value) ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i);
        const int all = tensors ? is_tensor(tape, part) : PySet_Contains(tape->plain, (PyObject *)Py_TYPE(part));
        if (all != 1)
            return all;
    }
    return DONE;
}

/* Append the leaves of an argument of an operator: a list without tensors is one leaf, its text. */
static int append_argument(Tape *tape, PyObject *list, PyObject *slot, PyObject *value)
{
    const int is_list = PyList_Check(value) || PyTuple_Check(value);
    if (!is_list && !is_tensor(tape, value)) {
        if (PyObject_IsInstance(value, tape->tensor))
            return REFUSED; /* of another class */
        const int plain = PySet_Contains(tape->plain, (PyObject *)Py_TYPE(value));
        PyObject *kept = plain == 1 ? value : plain == 0 ? stand_in(tape, (PyObject *)Py_TYPE(value)) : NULL;
        Py_XINCREF(kept);
        return append(list, slot, kept);
    }
    if (is_list && is_all(tape, value, 0) == 1)
        return append(list, slot, PyObject_Str(value));
    for (Py_ssize_t i = 0; is_list && i < PySequence_Size(value); i++) {
        PyObject *part = PyList_Check(value) ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i);
        if (part != Py_None && !is_tensor(tape, part))
            return REFUSED;
    }
    return append_leaves(tape, list, slot, value, 0, 0);
}

static int append_arguments(Tape *tape, PyObject *list, PyObject *args, PyObject *kwargs)
{
    int done = DONE;
    for (Py_ssize_t i = 0; done == DONE && i < PyTuple_Size(args); i++) {
        PyObject *slot = inner_slot(NULL, i);
        done = slot ? append_argument(tape, list, slot, PyTuple_GetItem(args, i)) : FAILED;
        Py_XDECREF(slot);
    }
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (done == DONE && kwargs && PyDict_Next(kwargs, &at, &name, &value)) {
        PyObject *slot = slot_of_keyword(tape, name);
        done = slot ? append_argument(tape, list, slot, value) : FAILED;
        Py_XDECREF(slot);
    }
    return done;
}

/* Note the views in a result: pairs of a tensor and a view of it, each told by its place. COPIED: it is one, and none. */
static int append_views(Tape *tape, PyObject *list, PyObject *base, PyObject *result)
{
    const int is_list = PyList_Check(result) || PyTuple_Check(result);
    if (!is_tensor(tape, base) || is_all(tape, result, 1) != 1)
        return REFUSED;
    for (Py_ssize_t i = 0; i < (is_list ? PySequence_Size(result) : 1); i++) {
        PyObject *view = !is_list ? result : PyList_Check(result) ? PyList_GetItem(result, i) : PyTuple_GetItem(result, i);
        Seen *from = new_seen(tape), *to = new_seen(tape);
        int done = from && to ? DONE : FAILED;
        if (done == DONE)
            done = look(tape, from, base, 0, 0);
        if (done == DONE)
            done = look(tape, to, view, 1, 0);
        const int same = done == DONE ? PyObject_RichCompareBool(from->storage, to->storage, Py_EQ) : 1;
        if (same != 1)
            done = same ? FAILED : is_list ? REFUSED : COPIED;
        if (done == DONE)
            done = append(list, (PyObject *)from, (Py_INCREF(to), (PyObject *)to));
        Py_XDECREF(from);
        Py_XDECREF(to);
        if (done != DONE)
            return done;
    }
    return DONE;
}

/* Tell whether a slice has plain ends, which nobody can change later. */
static int is_plain_slice(Tape *tape, PyObject *slice)
{
    PyObject *const names[] = {start_name, stop_name, step_name};
    int plain = 1;
    for (int i = 0; i < 3 && plain == 1; i++) {
        PyObject *end = PyObject_GetAttr(slice, names[i]);
        plain = end ? PySet_Contains(tape->plain, (PyObject *)Py_TYPE(end)) : -1;
        Py_XDECREF(end);
    }
    return plain == 1;
}

static PyObject *plain_arguments(Tape *tape, PyObject *args, int depth);

/* Return an argument as nobody can change it later: plain, `...`, a slice, or a tuple of such; NULL if it is another. */
static PyObject *plain_argument(Tape *tape, PyObject *value, int depth)
{
    if (depth < DEPTH && PyTuple_Check(value))
        return plain_arguments(tape, value, depth + 1);
    if (depth < DEPTH && PyList_Check(value)) {
        PyObject *copy = PyList_AsTuple(value), *tuple = copy ? plain_arguments(tape, copy, depth + 1) : NULL;
        Py_XDECREF(copy);
        return tuple;
    }
    const int plain = Py_TYPE(value) == &PySlice_Type ? is_plain_slice(tape, value)
                      : value == Py_Ellipsis          ? 1
                                                      : PySet_Contains(tape->plain, (PyObject *)Py_TYPE(value));
    Py_XINCREF(plain == 1 ? value : NULL);
    return plain == 1 ? value : NULL;
}

/* Return the arguments that are no tensors; NULL if one of them isn't plain. In one of them (`depth`) no tensor may be. */
static PyObject *plain_arguments(Tape *tape, PyObject *args, int depth)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < PyTuple_Size(args); i++) {
        PyObject *value = PyTuple_GetItem(args, i);
        if (!depth && is_tensor(tape, value))
            continue;
        PyObject *kept = is_tensor(tape, value) ? NULL : plain_argument(tape, value, depth);
        if (!kept || PyList_Append(list, kept) != 0)
            Py_CLEAR(list);
        Py_XDECREF(kept);
    }
    PyObject *tuple = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return tuple;
}

/* Call a method in Python about what could not be noted after an operator has run. Takes the reference to its result. */
static PyObject *report(PyObject *mode, PyObject *method, PyObject *operator, PyObject *args, PyObject *kwargs, PyObject *result)
{
    forget_error();
    PyObject *done = PyObject_CallMethodObjArgs(mode, method, operator, args, kwargs ? kwargs : Py_None, result, NULL);
    if (!done)
        Py_CLEAR(result); /* an interrupt */
    Py_XDECREF(done);
    return result;
}

/* Append an event; takes the references to its parts. */
static int append_event(Tape *tape, PyObject *event)
{
    const int done = event && PyList_Append(tape->events, event) == 0 ? DONE : FAILED;
    Py_XDECREF(event);
    return done;
}

/* Refuse an operator that has just made a node of autograd, where gradients are recorded: it is paired with its gradient. */
static int made_no_node(Tape *tape)
{
    if (tape->clock == Py_None)
        return DONE;
    PyObject *answer = PyObject_CallNoArgs(tape->clock);
    const int64_t nodes = answer ? PyLong_AsLongLong(answer) : -1, before = tape->nodes;
    Py_XDECREF(answer);
    tape->nodes = nodes;
    return !answer ? FAILED : nodes == before ? DONE : REFUSED;
}

/* An operator that runs: what names it, its place in the program, and what it was given: its inputs; if it makes views the
   arguments that are no tensors, and what they are views of. */
typedef struct {
    PyObject *operator, *place, *given, *base;
    int makes_views;
} Noted;

static void drop_noted(Noted *noted)
{
    Py_CLEAR(noted->operator);
    Py_CLEAR(noted->place);
    Py_CLEAR(noted->given);
    Py_CLEAR(noted->base);
}

/* Note what is known of an operator before it runs. */
static int begin_noted(Tape *tape, PyObject *entry, PyObject *args, PyObject *kwargs, Noted *noted)
{
    PyObject *context = NULL;
    *noted = (Noted){.operator= PyTuple_GetItem(entry, 2), .makes_views = PyTuple_GetItem(entry, 3) == Py_True};
    Py_INCREF(noted->operator);
    int done;
    if (noted->makes_views) {
        done = (kwargs && PyDict_Size(kwargs)) || !PyTuple_Size(args) ? REFUSED : look_around(tape, 1, &noted->place);
        if (done == DONE)
            done = (noted->given = plain_arguments(tape, args, 0)) ? DONE : REFUSED;
        if (done == DONE)
            Py_INCREF(noted->base = PyTuple_GetItem(args, 0));
    } else {
        done = (noted->given = PyList_New(0)) ? made_no_node(tape) : FAILED;
        if (done == DONE)
            done = look_around(tape, 0, &noted->place);
        if (done == DONE && tape->looks_in) {
            done = hide(tape, &context);
            if (done == DONE)
                done = append_arguments(tape, noted->given, args, kwargs);
            show(context);
        }
    }
    if (done != DONE)
        drop_noted(noted);
    return done;
}

/* Append the event of an operator that has run. `result`: NULL if it raised. What an operator that is none of views has left
   is found out later if it can't be noted here. */
static int end_noted(Tape *tape, Noted *noted, PyObject *result)
{
    if (noted->makes_views && !result)
        return DONE;
    PyObject *context = NULL, *found = NULL;
    int done = result ? hide(tape, &context) : REFUSED;
    if (done == DONE)
        done = (found = PyList_New(0)) ? DONE : FAILED;
    if (done == DONE && noted->makes_views)
        done = append_views(tape, found, noted->base, result);
    else if (done == DONE && tape->looks_out) {
        tape->inputs = noted->given;
        done = is_all(tape, result, 1) == 1 ? append_leaves(tape, found, NULL, result, 1, 0) : REFUSED;
        tape->inputs = NULL;
    }
    show(context);
    forget_error();
    int written = done;
    if (!noted->makes_views) {
        /* None: it raised. False: its end is reported later */
        PyObject *left = done == DONE ? found : result ? Py_False : Py_None;
        written = append_event(tape, PyTuple_Pack(5, noted->operator, noted->place, noted->given, left, Py_None));
    } else if (done == DONE)
        written = append_event(tape, PyTuple_Pack(4, noted->operator, noted->place, noted->given, found));
    Py_XDECREF(found);
    forget_error();
    return done == DONE && written == DONE ? DONE : result ? REFUSED : DONE;
}

/* Run an operator, and note it. */
static PyObject *run_noted(PyObject *mode, Tape *tape, PyObject *entry, PyObject *args, PyObject *kwargs, int *done)
{
    Noted noted;
    PyObject *kind, *value, *trace;
    *done = begin_noted(tape, entry, args, kwargs, &noted);
    if (*done != DONE)
        return NULL;
    PyObject *result = PyObject_Call(PyTuple_GetItem(entry, 1), args, kwargs);
    PyErr_Fetch(&kind, &value, &trace);
    const int ended = end_noted(tape, &noted, result);
    PyErr_Restore(kind, value, trace);
    if (ended != DONE)
        result = report(mode, noted.makes_views ? note_slowly : end_slowly, noted.operator, args, kwargs, result);
    drop_noted(&noted);
    return result;
}

/* Tell whether a method was given a function's operator, its arguments, and `more`. */
static int is_call(Tape *tape, PyObject *const *given, Py_ssize_t count, Py_ssize_t more)
{
    return count == 3 + more && tape->operators && PyTuple_Check(given[1]) && PyDict_Check(given[2]) ? is_open(tape) : REFUSED;
}

/* begin_function(operator, args, kwargs): note that a function is called, with its inputs. */
static PyObject *tape_begin_function(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    PyObject *stack = NULL, *context = NULL, *inputs = NULL;
    int done = is_call(tape, given, count, 0);
    if (done == DONE)
        done = look_around(tape, 0, &stack);
    if (done == DONE)
        done = (inputs = PyList_New(0)) ? DONE : FAILED;
    if (done == DONE && tape->looks_in) {
        done = hide(tape, &context);
        if (done == DONE)
            done = append_arguments(tape, inputs, given[1], given[2]);
        show(context);
    }
    if (done == DONE)
        done = append_event(tape, PyTuple_Pack(5, given[0], stack, inputs, Py_False, api_text));
    Py_XDECREF(stack);
    forget_error();
    if (done == DONE && play_values(tape, inputs) != DONE) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        append_event(tape, PyTuple_Pack(1, Py_None)); /* the function is not called */
        PyErr_Clear();
        PyErr_Restore(kind, value, trace);
    }
    Py_XDECREF(inputs);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done == DONE);
}

/* end_function(results): note that the function has ended that was noted last. `results`: a tuple of one; None: it raised. */
static PyObject *tape_end_function(PyObject *object, PyObject *results)
{
    Tape *tape = (Tape *)object;
    PyObject *context = NULL, *outputs = NULL;
    int done = is_open(tape);
    if (done == DONE && results != Py_None) {
        PyObject *result = PyTuple_Check(results) && PyTuple_Size(results) == 1 ? PyTuple_GetItem(results, 0) : NULL;
        done = result ? hide(tape, &context) : REFUSED;
        if (done == DONE)
            done = (outputs = PyList_New(0)) ? DONE : FAILED;
        if (done == DONE && tape->looks_out)
            done = is_all(tape, result, 1) == 1 ? append_leaves(tape, outputs, NULL, result, 1, 0) : REFUSED;
        show(context);
    }
    if (done == DONE)
        done = append_event(tape, PyTuple_Pack(1, outputs ? outputs : Py_None));
    forget_error();
    if (done == DONE)
        play_values(tape, outputs);
    Py_XDECREF(outputs);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done == DONE);
}

static int takes_one_tensor(Tape *tape, PyObject *args)
{
    int count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
        count += is_tensor(tape, PyTuple_GetItem(args, i));
    return count == 1;
}

/* note_views(operator, args, kwargs, result): note the views that a function has made. */
static PyObject *tape_note_views(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    PyObject *source = NULL, *plain = NULL, *context = NULL, *views = NULL;
    int done = is_call(tape, given, count, 1);
    if (done == DONE)
        done = PyDict_Size(given[2]) || !PyTuple_Size(given[1]) ? REFUSED : look_around(tape, 1, &source);
    if (done == DONE)
        done = (plain = plain_arguments(tape, given[1], 0)) ? DONE : REFUSED;
    if (done == DONE)
        done = hide(tape, &context);
    if (done == DONE) {
        done = (views = PyList_New(0)) ? append_views(tape, views, PyTuple_GetItem(given[1], 0), given[3]) : FAILED;
        show(context);
    }
    if (done == DONE)
        done = append_event(tape, PyTuple_Pack(4, given[0], source, plain, views));
    Py_XDECREF(source);
    Py_XDECREF(plain);
    Py_XDECREF(views);
    forget_error();
    return done == COPIED && takes_one_tensor(tape, given[1]) ? nothing() : PyBool_FromLong(done == DONE);
}

/* __torch_dispatch__(func, types, args, kwargs) */
static PyObject *gate_dispatch(PyObject *mode, PyObject *const *given, Py_ssize_t count)
{
    PyObject *object = PyObject_GetAttr(mode, tape_name), *result = NULL;
    Tape *tape = (Tape *)object;
    PyObject *kwargs = count == 4 && given[3] != Py_None ? given[3] : NULL;
    int done = object && Py_TYPE(object) == tape_type && (count == 3 || count == 4) && PyTuple_Check(given[1]) && PyTuple_Check(given[2])
                       && (!kwargs || PyDict_Check(kwargs)) && tape->operators && PyTuple_Size(given[1]) == 0
                   ? is_open(tape)
                   : REFUSED;
    PyObject *entry = done == DONE ? at_address(tape->operators, given[0]) : NULL;
    if (entry) {
        Py_INCREF(entry);
        result = run_noted(mode, tape, entry, given[2], kwargs, &done);
        Py_DECREF(entry);
    } else
        done = REFUSED;
    Py_XDECREF(object);
    if (done == DONE)
        return result;
    forget_error();
    return PyObject_CallMethodObjArgs(mode, slowly, count > 0 ? given[0] : NULL, count > 1 ? given[1] : NULL,
                                      count > 2 ? given[2] : NULL, count > 3 ? given[3] : NULL, NULL);
}

/* -- for observer.cpp, see notes.h ---------------------------------------------------------------- */

static void *offer_begin(PyObject *object, PyObject *func, PyObject *args, PyObject *kwargs)
{
    Tape *tape = (Tape *)object;
    int done = Py_TYPE(object) == tape_type && tape->operators ? is_open(tape) : REFUSED;
    PyObject *entry = done == DONE ? at_address(tape->operators, func) : NULL;
    Noted *noted = entry ? PyMem_Calloc(1, sizeof *noted) : NULL;
    if (noted && begin_noted(tape, entry, args, kwargs, noted) != DONE) {
        PyMem_Free(noted);
        noted = NULL;
    }
    forget_error();
    return noted;
}

static int offer_end(PyObject *object, void *noted, PyObject *result)
{
    const int done = end_noted((Tape *)object, noted, result);
    drop_noted(noted);
    PyMem_Free(noted);
    return done == DONE;
}

static int offer_makes_views(void *noted)
{
    return ((Noted *)noted)->makes_views;
}

static const Notes notes = {NOTES_VERSION, offer_begin, offer_end, offer_makes_views};

/* watch(operators, kinds, numbers, lines, clock, looks_in, looks_out): what a gate needs to know.

   `operators`: by id, the operator itself, what calls it, what names it, and whether it makes views. `kinds`: of code by id,
   or None if no call stacks are wanted; `numbers`, `lines`: see call_stacks.py. `clock`: see `made_no_node`. */
static PyObject *tape_watch(PyObject *object, PyObject *const *given, Py_ssize_t count)
{
    Tape *tape = (Tape *)object;
    if (count != 7 || tape->operators) {
        PyErr_SetString(PyExc_ValueError, "watch once, with 7 arguments");
        return NULL;
    }
    PyObject **to[] = {&tape->operators, &tape->kinds, &tape->numbers, &tape->lines, &tape->clock};
    for (int i = 0; i < 5; i++) {
        Py_INCREF(given[i]);
        *to[i] = given[i];
    }
    tape->looks_in = given[5] == Py_True;
    tape->looks_out = given[6] == Py_True;
    Py_RETURN_NONE;
}

static PyMethodDef gate_methods[] = {
    {"__torch_dispatch__", (PyCFunction)(void (*)(void))gate_dispatch, METH_FASTCALL, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot gate_slots[] = {{Py_tp_methods, gate_methods}, {0, NULL}};
static PyType_Spec gate_spec = {"_tape.Gate", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, gate_slots};
