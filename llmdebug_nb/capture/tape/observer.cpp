/* Operators, told by torch's own observer (`at::RecordFunction`, which its profiler uses, too) instead of a dispatch mode:
   the dispatcher does not go through Python, and the program computes what it computes without us.

   Built against the installed torch, see torch_observer.py. What is noted, and how, is in tape.c; here is only when: an operator
   counts where a dispatch mode below all others would see it. The dispatcher tells of composite operators, too, and of those
   that others rewrite (autocast, modes, subclasses of tensors, transforms): these pass on, and what they call counts.
   What an operator's kernel calls does not. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "notes.h"

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

const Notes *notes;

/* -- operators ------------------------------------------------------------------------------------ */

enum class Type { PLAIN, DTYPE, LAYOUT, MEMORY_FORMAT };

/* An operator of the dispatcher. `counts_as`: the name that it is recorded by. `func`: as Python knows that; None if it doesn't.
   `positional`: how many of its arguments may be given by position. `stays`: nobody registers it anew. `computes`: itself,
   although it may call others. */
struct Operator {
    std::string name, overload, counts_as;
    std::optional<c10::OperatorHandle> handle;
    std::vector<Type> types;
    size_t positional = 0;
    bool stays = false, computes = false;
    PyObject *func = nullptr;
};

Type type_of(const c10::Argument &argument)
{
    auto type = argument.real_type();
    if (auto optional = type->cast<c10::OptionalType>())
        type = optional->getElementType();
    switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType:
        return Type::DTYPE;
    case c10::TypeKind::LayoutType:
        return Type::LAYOUT;
    case c10::TypeKind::MemoryFormatType:
        return Type::MEMORY_FORMAT;
    default:
        return Type::PLAIN;
    }
}

Operator learned(const char *name, const char *overload)
{
    Operator made;
    made.name = made.counts_as = name, made.overload = overload;
    made.handle = c10::Dispatcher::singleton().findSchema({made.name, made.overload});
    if (!made.handle)
        return made;
    made.stays = made.name.rfind("aten::", 0) == 0;
    made.computes = made.name == "aten::max_pool1d"; /* unless a mode looks on, or gradients are wanted */
    for (const auto &argument : made.handle->schema().arguments()) {
        made.types.push_back(type_of(argument));
        made.positional += !argument.kwarg_only();
    }
    if (made.name == "aten::_reshape_alias") { /* what `reshape` calls in place of `view` unless a mode looks on */
        made.counts_as = "aten::view";
        made.types.resize(made.positional = 2); /* all but the strides */
    }
    return made;
}

/* Return the operator that the dispatcher calls. Its names lie where they are as long as it is registered. */
Operator &operator_of(const at::RecordFunction &call)
{
    thread_local std::unordered_map<const char *, std::unordered_map<const char *, Operator>> known;
    const char *name = call.name(), *overload = call.overload_name();
    Operator &found = known[name][overload];
    if (!found.stays || found.name != name || found.overload != overload)
        found = learned(name, overload);
    return found;
}

/* The last of some values: a call by the stack shows all that is on it. */
c10::ArrayRef<const IValue> last_of(const c10::ArrayRef<const IValue> values, size_t count)
{
    return values.slice(values.size() - std::min(count, values.size()));
}

c10::ArrayRef<const IValue> inputs_of(const Operator &op, const at::RecordFunction &call)
{
    return last_of(call.inputs(), op.handle->schema().arguments().size());
}

DispatchKeySet keys_of(const c10::ArrayRef<const IValue> inputs)
{
    const auto local = c10::impl::tls_local_dispatch_key_set();
    DispatchKeySet keys = local.included_;
    for (const IValue &input : inputs) {
        if (input.isTensor())
            keys = keys | input.toTensor().key_set();
        else if (input.isTensorList())
            for (const at::Tensor &tensor : input.toTensorVector())
                keys = keys | tensor.key_set();
        else if (input.isOptionalTensorList())
            for (const std::optional<at::Tensor> tensor : input.toOptionalTensorList())
                keys = tensor ? keys | tensor->key_set() : keys;
    }
    return keys - local.excluded_;
}

/* Of whoever stands above a dispatch mode, and calls the dispatcher again. */
const DispatchKeySet rewriting({DispatchKey::Python, DispatchKey::FuncTorchDynamicLayerFrontMode,
                                DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatched,
                                DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper, DispatchKey::Batched,
                                DispatchKey::Functionalize});

/* Tell whether a call's kernel is none of a device, but calls other operators that count in its place. */
bool passes_on(const Operator &op, const c10::ArrayRef<const IValue> inputs)
{
    const DispatchKeySet keys = keys_of(inputs);
    if (keys.has_any(rewriting))
        return true;
    for (const DispatchKey key : keys & c10::autocast_dispatch_keyset)
        if (op.handle->hasKernelForDispatchKey(key) && !op.handle->isKernelFallthroughKernel(key))
            return true;
    const DispatchKeySet own = keys - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset
                               - DispatchKeySet(DispatchKey::BackendSelect);
    return !op.computes && op.handle->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)
           && !op.handle->hasKernelForAnyDispatchKey(own);
}

/* Tell whether Python knows a tensor. */
bool has_object(const at::Tensor &tensor)
{
    const auto has = [](const auto *slot) {
        if constexpr (requires { slot->load_pyobj(); })
            return slot->load_pyobj() != nullptr;
        else
            return slot->_unchecked_untagged_pyobj() != nullptr;
    };
    return has(tensor.unsafeGetTensorImpl()->pyobj_slot());
}

/* Python's object of a tensor. One that Python does not know yet is shown as a copy, which shares its memory: torch may
   make it an object of another class. */
py::object object_of(const at::Tensor &tensor)
{
    if (!tensor.defined())
        return py::none();
    if (has_object(tensor))
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    const auto *own = tensor.unsafeGetTensorImpl();
    return py::reinterpret_steal<py::object>(
        THPVariable_Wrap(at::Tensor(own->shallow_copy_and_detach(own->version_counter(), false))));
}

PyObject *object_of(const IValue &value, Type type)
{
    if (value.isTensor() && !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) /* else Python gets the number */
        return object_of(value.toTensor()).release().ptr();
    if (value.isTensorList() || value.isOptionalTensorList()) {
        py::list all;
        for (const IValue &each : value.toListRef())
            all.append(each.isTensor() ? object_of(each.toTensor()) : py::none());
        return all.release().ptr();
    }
    if (type != Type::PLAIN && value.isInt()) {
        const int64_t number = value.toInt();
        PyObject *object = type == Type::DTYPE    ? (PyObject *)torch::getTHPDtype((c10::ScalarType)number)
                           : type == Type::LAYOUT ? (PyObject *)torch::getTHPLayout((c10::Layout)number)
                                                  : torch::utils::getTHPMemoryFormat((c10::MemoryFormat)number);
        Py_INCREF(object);
        return object;
    }
    return torch::jit::toPyObject(value).release().ptr();
}

/* The arguments as a dispatch mode gets them: without those at their defaults, but for such before others by position. */
std::pair<py::tuple, py::dict> arguments_of(const Operator &op, const c10::ArrayRef<const IValue> inputs)
{
    const auto &arguments = op.handle->schema().arguments();
    const auto usual = [&](size_t i) {
        const auto &value = arguments[i].default_value();
        return value.has_value() && *value == inputs[i];
    };
    size_t count = std::min(op.positional, inputs.size());
    while (count > 0 && usual(count - 1))
        count--;
    py::tuple args(count);
    for (size_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(args.ptr(), (Py_ssize_t)i, object_of(inputs[i], op.types[i]));
    py::dict kwargs;
    for (size_t i = op.positional; i < op.types.size(); i++)
        if (!usual(i))
            kwargs[arguments[i].name().c_str()] = py::reinterpret_steal<py::object>(object_of(inputs[i], op.types[i]));
    return {std::move(args), std::move(kwargs)};
}

/* -- watching ------------------------------------------------------------------------------------- */

/* Holds Python's lock, and keeps an exception that is on its way. */
class Locked {
  public:
    Locked() : state(PyGILState_Ensure()) { PyErr_Fetch(&kind, &value, &trace); }
    ~Locked()
    {
        PyErr_Restore(kind, value, trace);
        PyGILState_Release(state);
    }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;

  private:
    PyGILState_STATE state;
    PyObject *kind, *value, *trace;
};

/* What watches a thread: its tape, and an `Observed` in Python. `inside`: of an operator that counts. */
struct Watcher {
    PyObject *tape, *observed;
    at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
    bool inside = false;
    Watcher(PyObject *tape, PyObject *observed) : tape(Py_NewRef(tape)), observed(Py_NewRef(observed)) {}
    ~Watcher()
    {
        if (!Py_IsInitialized() || !PyGILState_Check())
            return; /* the thread ends, or Python has, in the midst of it: what it holds stays */
        Py_DECREF(tape);
        Py_DECREF(observed);
    }
};

thread_local std::shared_ptr<Watcher> here;

/* An operator that counts and runs. `call`: what `Observed.begin` returned, if it could not be noted. */
struct Running : at::ObserverContext {
    std::shared_ptr<Watcher> watcher;
    PyObject *func = nullptr, *args = nullptr, *kwargs = nullptr, *call = nullptr;
    void *noted = nullptr;
    size_t results = 0;
    int exceptions = std::uncaught_exceptions();
};

void drop(Running *running)
{
    Py_CLEAR(running->func);
    Py_CLEAR(running->args);
    Py_CLEAR(running->kwargs);
    Py_CLEAR(running->call);
    running->watcher.reset();
}

int raise(void *exception)
{
    PyErr_SetObject((PyObject *)Py_TYPE((PyObject *)exception), (PyObject *)exception);
    Py_DECREF((PyObject *)exception);
    return -1;
}

unsigned long main_thread; /* where handlers of signals and pending calls run */

/* Let an exception of Python wait until the operator has returned: nothing may be thrown through it. */
void put_off()
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    if (value && trace)
        PyException_SetTraceback(value, trace);
    if (value && PyThread_get_thread_ident() != main_thread)
        PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), kind); /* as another thread has sent it here */
    else if (value && Py_AddPendingCall(raise, Py_NewRef(value)) != 0)
        PyErr_SetInterrupt(); /* too many wait */
    Py_XDECREF(kind);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* Do a part of our own work: what C++ throws in it ends it, is told, and never reaches the program. */
template <typename Work> void attempt(PyObject *observed, Work work)
{
    try {
        work();
    } catch (py::error_already_set &error) {
        error.restore();
        put_off();
    } catch (const std::exception &error) {
        PyObject *told = PyObject_CallMethod(observed, "lost", "s", error.what());
        if (!told)
            put_off();
        Py_XDECREF(told);
    }
}

/* Return an operator as Python knows it, a new reference; None or NULL if it doesn't. */
PyObject *func_of(Operator &op, PyObject *observed)
{
    if (op.func)
        return Py_NewRef(op.func);
    PyObject *func = PyObject_CallMethod(observed, "find", "ss", op.counts_as.c_str(), op.overload.c_str());
    if (!func)
        put_off();
    else if (op.stays)
        op.func = Py_NewRef(func);
    return func;
}

void begin(Running &running, Operator &op, const at::RecordFunction &call)
{
    PyObject *tape = running.watcher->tape, *observed = running.watcher->observed;
    running.func = func_of(op, observed);
    if (!running.func || running.func == Py_None)
        return;
    auto [args, kwargs] = arguments_of(op, inputs_of(op, call));
    running.args = args.release().ptr();
    running.kwargs = kwargs.release().ptr();
    running.noted = notes->begin(tape, running.func, running.args, running.kwargs);
    if (running.noted)
        return;
    running.call = PyObject_CallMethod(observed, "begin", "OOO", running.func, running.args, running.kwargs);
    if (!running.call)
        put_off();
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction &call)
{
    if (!here || here->inside || c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python))
        return nullptr;
    Operator &op = operator_of(call);
    if (!op.handle || call.inputs().size() < op.types.size() || passes_on(op, inputs_of(op, call)))
        return nullptr; /* fewer inputs than it has: somebody else uses its name */
    auto running = std::make_unique<Running>();
    running->watcher = here;
    running->results = op.handle->schema().returns().size();
    here->inside = true;
    const Locked locked;
    attempt(here->observed, [&] { begin(*running, op, call); });
    if (!running->noted && !running->call) { /* nobody waits for its end */
        running->watcher->inside = false;
        drop(running.get());
        return nullptr;
    }
    return running;
}

PyObject *result_of(const c10::ArrayRef<const IValue> outputs)
{
    if (outputs.empty())
        return Py_NewRef(Py_None);
    if (outputs.size() == 1)
        return object_of(outputs[0], Type::PLAIN);
    py::tuple all(outputs.size());
    for (size_t i = 0; i < outputs.size(); i++)
        PyTuple_SET_ITEM(all.ptr(), (Py_ssize_t)i, object_of(outputs[i], Type::PLAIN));
    return all.release().ptr();
}

/* End an operator. `result`: NULL if it raised. */
void end(Running &running, PyObject *result)
{
    PyObject *observed = running.watcher->observed, *done;
    PyObject *left = result ? result : Py_None, *raised = result ? Py_False : Py_True;
    if (running.noted) {
        PyObject *views = notes->makes_views(running.noted) ? Py_True : Py_False;
        if (notes->end(running.watcher->tape, running.noted, result))
            return;
        done = PyObject_CallMethod(observed, "end_noted", "OOOOO", views, running.func, running.args, running.kwargs, left);
    } else
        done = PyObject_CallMethod(observed, "end", "OOOOOO", running.call, running.func, running.args, running.kwargs, left,
                                   raised);
    if (!done)
        put_off();
    Py_XDECREF(done);
}

void on_end(const at::RecordFunction &call, at::ObserverContext *context)
{
    if (!context)
        return;
    auto *running = static_cast<Running *>(context);
    const Locked locked;
    PyObject *result = nullptr;
    if (std::uncaught_exceptions() <= running->exceptions)
        attempt(running->watcher->observed, [&] {
            const c10::ArrayRef<const IValue> outputs(call.outputs().data(), call.outputs().size());
            result = result_of(last_of(outputs, running->results));
        });
    end(*running, result);
    Py_XDECREF(result);
    running->watcher->inside = false; /* what we ran counts as little as what the kernel ran */
    drop(running);
}

/* -- the module ----------------------------------------------------------------------------------- */

/* start(tape, observed): watch this thread. Returns False if it is watched, or torch's observers are off. */
PyObject *start(PyObject *, PyObject *const *given, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "start takes a tape and what is told of other operators");
        return nullptr;
    }
    if (here || !at::isRecordFunctionEnabled())
        Py_RETURN_FALSE;
    here = std::make_shared<Watcher>(given[0], given[1]);
    here->handle = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                                  .needsInputs(true)
                                                  .needsOutputs(true)
                                                  .scopes({at::RecordScope::FUNCTION}));
    Py_RETURN_TRUE;
}

/* stop(observed): watch this thread no longer, if it is watched for that. Returns whether it was. */
PyObject *stop(PyObject *, PyObject *observed)
{
    if (!here || here->observed != observed)
        Py_RETURN_FALSE;
    at::removeCallback(here->handle);
    here.reset();
    Py_RETURN_TRUE;
}

/* use(notes): take what tape.c offers, a capsule. */
PyObject *use(PyObject *, PyObject *offered)
{
    const auto *given = (const Notes *)PyCapsule_GetPointer(offered, "_tape.notes");
    if (!given)
        return nullptr;
    if (given->version != NOTES_VERSION) {
        PyErr_SetString(PyExc_ValueError, "it was built of other sources");
        return nullptr;
    }
    notes = given;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, nullptr},
                         {"stop", stop, METH_O, nullptr},
                         {"use", use, METH_O, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_observer", nullptr, -1, methods};

} // namespace

PyMODINIT_FUNC PyInit__observer()
{
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading ? PyObject_CallMethod(threading, "main_thread", nullptr) : nullptr;
    PyObject *number = thread ? PyObject_GetAttrString(thread, "ident") : nullptr;
    main_thread = number ? PyLong_AsUnsignedLong(number) : 0;
    Py_XDECREF(threading);
    Py_XDECREF(thread);
    Py_XDECREF(number);
    return PyErr_Occurred() ? nullptr : PyModule_Create(&definition);
}
