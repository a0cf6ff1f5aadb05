"""Kinds of host state that hooks change and steps read, and the places where it is kept."""

# ruff: noqa: E501 (each line is a row of a table)

from __future__ import annotations

from typing import NamedTuple


class Container(NamedTuple):
    """A kind of host state; ``@`` stands for it, ``$`` for a number that is written.

    Attributes:
        made: the expression that makes one.
        writes: statements that change it; one that begins with ``@ =`` puts another in its place.
        reads: expressions that give a number.
    """

    made: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]


_LIST = ("@.append($)", "@[0] = $", "@.insert(0, $)", "@.extend([$, 1.0])", "@[:] = [$]", "@ += [$]", "@.reverse()", "@ = [$]")
_OF_LIST = ("sum(@)", "float(len(@))", "@[-1]", "max(@)", "float(3.0 in @)", "sum(one for one in @ if one > 1)", "sorted(@)[0]")
_DICT = ("@['a'] = $", "@.update(b=$)", "@.pop('b', None)", "@.setdefault('z', $)", "@['a'] += $", "@[str($)] = 1.0")
_OF_DICT = ("@['a']", "@.get('b', 0.5)", "float(len(@))", "sum(@.values())", "float('b' in @)", "sum(v for _, v in @.items())")
_NAMED = ("@.x = $", "@.x += $", "setattr(@, 'x', $)", "@.__dict__.update(x=$)")
_OF_NAMED = ("@.x", "getattr(@, 'x')", "vars(@)['x']", "@.x if hasattr(@, 'x') else 0.0")
_SET = ("@.add($)", "@.discard(1.0)", "@.update([$, 5.0])", "@ |= {$}", "@ -= {1.0}", "@ = @ ^ {$}", "@.clear()")
_OF_SET = ("sum(@)", "float(len(@))", "float(3.0 in @)", "max(@, default=0.5)", "float(@ <= {1.0, 3.0})", "len(@ | {3.0}) / 2")

_SEQUENCES = {
    "list": Container("[1.0, 2.0]", _LIST, _OF_LIST),
    "nested_list": Container("[[1.0], 2.0]", ("@[0].append($)", "@[0][0] = $"), ("sum(@[0])", "@[0][-1]", "float(len(@[0]))")),
    "deque": Container("collections.deque([1.0, 2.0], maxlen=3)", ("@.append($)", "@.appendleft($)", "@.rotate(1)"), _OF_LIST),
    "tuple": Container("(1.0, 2.0)", ("@ = (*@, $)", "@ = ($,)", "@ += ($,)"), _OF_LIST),
    "set": Container("{1.0}", _SET, _OF_SET),
    "set_of_tuples": Container(
        "{(1.0, 'a')}", ("@.add(($, 'b'))", "@.discard((1.0, 'a'))"), ("sum(n for n, _ in @)", "len(@) / 3")
    ),
    "frozenset": Container("frozenset([1.0])", ("@ = @ | {$}", "@ = frozenset([$])"), _OF_SET),
    "user_list": Container("collections.UserList([1.0, 2.0])", ("@.append($)", "@[0] = $", "@.data[0] = $"), _OF_LIST),
    "own_list": Container("OwnList([1.0, 2.0])", (*_LIST[:4], "@.x = $"), (*_OF_LIST, "@.x")),
    "heap": Container("[1.0, 2.0]", ("heapq.heappush(@, $)", "heapq.heapreplace(@, $)"), ("heapq.nsmallest(1, @)[0]", "sum(@)")),
    "queue": Container("filled_queue()", ("@.put($)", "@.queue[0] = $"), ("@.qsize() / 2", "sum(@.queue)", "@.queue[-1]")),
    "array": Container("array.array('d', [1.0, 2.0])", ("@[0] = $", "@.append($)"), ("sum(@)", "@[0]", "@[-1]", "float(len(@))")),
    "bytearray": Container("bytearray(b'ab')", ("@[0] = int($) % 9", "@.append(int($) % 9)"), ("sum(@) / 99", "@[0] / 99")),
    "memoryview": Container(
        "memoryview(array.array('d', [1.0, 2.0]))", ("@[0] = $", "@[1] = $"), ("@[0]", "sum(@.tolist())", "@[-1]")
    ),
    "text": Container("'ab'", ("@ += str($)", "@ = str($)"), ("len(@) / 3", "float('3' in @)", "float(@ == 'ab')")),
    "text_io": Container("io.StringIO('ab')", ("@.write(str($))",), ("len(@.getvalue()) / 4", "@.tell() / 4")),
}
_MAPPINGS = {
    "dict": Container("{'a': 1.0}", _DICT, _OF_DICT),
    "nested_dict": Container(
        "{'a': {'b': 1.0}}", ("@['a']['b'] = $", "@['a'] = {'b': $}"), ("@['a']['b']", "sum(@['a'].values())")
    ),
    "ordered_dict": Container(
        "collections.OrderedDict(a=1.0)", (*_DICT, "@.move_to_end('a')"), (*_OF_DICT, "list(@.values())[-1]")
    ),
    "defaultdict": Container(
        "collections.defaultdict(float, a=1.0)", ("@['a'] += $", "@['b'] = $"), ("@['a']", "sum(@.values())")
    ),
    "counter": Container(
        "collections.Counter(a=1)", ("@['a'] += 1", "@.update('ab')"), ("float(@['a'])", "float(sum(@.values()))")
    ),
    "chain_map": Container(
        "collections.ChainMap({'a': 1.0})", ("@['a'] = $", "@.maps[0]['b'] = $"), ("@['a']", "@.get('b', 0.5)")
    ),
    "user_dict": Container("collections.UserDict(a=1.0)", ("@['a'] = $", "@.data['b'] = $"), _OF_DICT),
    "own_dict": Container("OwnDict(a=1.0)", ("@['a'] = $", "@.update(b=$)"), ("@['a']", "@['nothing']", "@.get('b', 0.5)")),
    "mapping_proxy": Container("proxy_of()", ("@[0]['a'] = $", "@[0]['b'] = $"), ("@[1]['a']", "sum(@[1].values())")),
    "by_tuple": Container("{('a', 1): 1.0}", ("@['a', 1] = $", "@['b', 2] = $"), ("@['a', 1]", "@.get(('b', 2), 0.5)")),
    "by_object": Container("{KEY: 1.0}", ("@[KEY] = $", "@[Plain] = $"), ("@[KEY]", "float(len(@))", "@.get(Plain, 0.5)")),
    "environment": Container(
        "os.environ", ("@['XLA_FUZZ'] = str($)", "@.pop('XLA_FUZZ', 0)"), ("float(@.get('XLA_FUZZ', '0.5'))",)
    ),
}
_OBJECTS = {
    "namespace": Container("types.SimpleNamespace(x=1.0)", _NAMED, _OF_NAMED),
    "plain_object": Container("Plain()", (*_NAMED, "@.raise_to($)", "@.prop = $"), (*_OF_NAMED, "@.value()", "@.prop", "@()")),
    "copied_object": Container(
        "copy.deepcopy(Plain())", (*_NAMED, "@ = copy.copy(@); @.x = $"), (*_OF_NAMED, "@.value()", "@.prop")
    ),
    "pickled_object": Container("again(Plain())", (*_NAMED, "@ = again(@); @.x = $"), (*_OF_NAMED, "@.value()", "@.prop")),
    "dataclass": Container("Record()", (*_NAMED, "@.many.append($)"), (*_OF_NAMED, "sum(@.many)", "dataclasses.asdict(@)['x']")),
    "frozen_dataclass": Container(
        "Frozen()",
        ("@ = dataclasses.replace(@, x=$)", "object.__setattr__(@, 'x', $)"),
        ("@.x", "float(@ == Frozen())", "hash(@) % 5 / 5"),
    ),
    "named_tuple": Container("Pair(1.0, 2.0)", ("@ = @._replace(x=$)", "@ = Pair($, 2.0)"), ("@.x", "sum(@)", "@[0]")),
    "slots": Container("Slotted()", ("@.x = $", "@.x += $"), ("@.x", "getattr(@, 'x')")),
    "slots_below": Container("SlottedBelow()", ("@.x = $", "@.y = $", "del @.y; @.y = $"), ("@.x", "@.y", "@.x + @.y")),
    "descriptor": Container("Described()", ("@.d = $", "@.d += 1"), ("@.d", "vars(@).get('_d', 0.5)", "type(@).d.reads / 9")),
    "weak_descriptor": Container("Described()", ("@.w = $", "@.w += 1"), ("@.w", "getattr(@, 'w')")),
    "getattr_object": Container("Dynamic()", ("@.kept['x'] = $", "@.kept['y'] = $"), ("@.x", "@.y", "getattr(@, 'z', 0.5)")),
    "getattribute_object": Container("Watched()", ("@.x = $", "@.x += $"), ("@.x", "getattr(@, 'x')")),
    "cached_property": Container("Cached()", ("@.x = $", "@.__dict__.pop('twice', 0)"), ("@.twice", "@.twice + @.x")),
    "indexed_object": Container(
        "Indexed()", ("@['a'] = $", "@['b'] = $"), ("@['a']", "float(len(@))", "sum(@)", "float('b' in @)")
    ),
    "class_object": Container("fresh_class()", ("@.x = $", "setattr(@, 'x', $)"), ("@.x", "@().x", "@.twice()", "@.half()")),
    "base_class": Container("fresh_class(below=True)", ("@.__mro__[1].x = $", "@.x = $"), ("@.x", "@().x", "@.twice()")),
    "metaclass": Container("fresh_class(meta=True)", ("type(@).m = $", "type(@).m += 1"), ("@.m", "type(@).m", "@.of_class")),
    "method_replaced": Container("fresh_class()", ("@.half = staticmethod(lambda: $)", "@.x = $"), ("@.half()", "@().half()")),
    "class_of_object": Container("Plain()", ("@.__class__ = Doubled", "@.x = $"), ("@.value()", "@.prop", "@.x")),
    "enum": Container("Mode.LOW", ("@ = Mode.HIGH", "@ = Mode(1.0)"), ("@.value", "float(@ is Mode.HIGH)", "len(@.name) / 3")),
    "module_object": Container("types.ModuleType('held')", ("@.x = $", "@.__dict__['x'] = $"), ("getattr(@, 'x', 1.0)",)),
    "thread_local": Container("local_of()", ("@.x = $", "@.x += 1"), ("@.x",)),
    "context_var": Container("contextvars.ContextVar('v', default=1.0)", ("@.set($)", "@.set(@.get() + 1)"), ("@.get()",)),
    "weakref": Container("Weak()", ("@.strong.x = $", "@.other()"), ("@.ref().x", "@.by_name['a'].x", "float(len(@.all))")),
    "exception": Container("ValueError(1.0)", ("@.args = ($,)", "@.x = $"), ("@.args[0]", "getattr(@, 'x', 0.5)")),
}
_FUNCTIONS = {
    "cell": Container("made_cell()", ("@[1]($)",), ("@[0]()",)),
    "cell_contents": Container("made_cell()", ("@[0].__closure__[0].cell_contents = $",), ("@[0]()",)),
    "deep_cell": Container("made_deep()", ("@[1]($)", "@[1](1)"), ("@[0]()", "sum(@[2]())")),
    "default": Container("with_default()", ("@.__defaults__ = ($,)", "@.__kwdefaults__['k'] = $"), ("@()", "@(2.0)")),
    "function_note": Container("with_default()", ("@.x = $", "@.__dict__['x'] = $"), ("getattr(@, 'x', 0.5)",)),
    "code": Container("with_default()", ("@.__code__ = (lambda a=1.0, *, k=0.5: a * 2 + k).__code__",), ("@()", "@(2.0)")),
    "partial": Container(
        "functools.partial(scaled, factor=1.0)",
        ("@.keywords['factor'] = $", "@ = functools.partial(@, factor=$)"),
        ("@(2.0)", "@.keywords['factor']"),
    ),
    "partial_of_object": Container("functools.partial(times, Plain())", ("@.args[0].x = $",), ("@(2.0)", "@.args[0].x")),
    "partial_method": Container("Partly()", ("@.x = $",), ("@.double()", "@.x")),
    "bound_method": Container("Plain().value", ("@.__self__.x = $",), ("@()",)),
    "lru_cache": Container(
        "made_cached()", ("@.kept['a'] = $", "@.cache_clear()"), ("@()", "@.kept['a']", "@.cache_info().hits / 9")
    ),
    "wrapped": Container("made_wrapped()", ("@.__wrapped__.x = $", "@.x = $"), ("@()", "@.x")),
    "dispatched": Container("made_dispatch()", ("@.register(float, lambda one: $)",), ("@(1.0)", "float(len(@.registry)) / 3")),
    "count": Container("itertools.count(1)", ("next(@)", "@ = itertools.count($)"), ("next(@) % 3", "next(@) / 9")),
    "cycle": Container("itertools.cycle([1.0, 2.0, 0.5])", ("next(@)",), ("next(@)",)),
    "generator": Container("made_generator()", ("@.send($)", "next(@)"), ("next(@)",)),
    "list_iterator": Container("iter([1.0, 0.5] * 200)", ("next(@)",), ("next(@)", "@.__length_hint__() / 400")),
    "own_iterator": Container("Stepping()", ("@.at = $", "next(@)"), ("next(@) % 3", "@.at % 3")),
    "context": Container("Entered()", ("@.__enter__()", "@.depth = 2.0"), ("@.depth", "float(bool(@))")),
}
_NUMBERS = {
    "float": Container("1.0", ("@ = $", "@ += 1"), ("@", "float(@ > 2)", "min(@, 2.0)")),
    "int": Container("1", ("@ = int($)", "@ += 1"), ("@ / 2", "float(@ % 2 == 0)", "float(@.bit_length())")),
    "flag": Container("False", ("@ = True", "@ = not @"), ("float(@)", "1.0 if @ else 0.5")),
    "optional": Container("None", ("@ = $", "@ = None"), ("1.0 if @ is None else 0.5", "@ or 0.25")),
    "fraction": Container("fractions.Fraction(1, 2)", ("@ += 1", "@ = fractions.Fraction($)"), ("float(@)", "@.numerator / 4")),
    "decimal": Container("decimal.Decimal('1.5')", ("@ += 1", "@ = decimal.Decimal($)"), ("float(@)", "float(@ > 2)")),
    "complex": Container("1 + 2j", ("@ = complex($, 1)", "@ *= 1j"), ("@.real", "abs(@)", "@.imag")),
    "range": Container("range(2)", ("@ = range(int($) + 1)",), ("len(@) / 2", "sum(@) / 3", "float(2 in @)")),
    "random": Container(
        "random.Random(3)", ("@.random()", "@.seed(int($))"), ("@.random()", "@.uniform(0, 2)", "@.choice([0.5, 1.5])")
    ),
    "numpy_random": Container("np.random.RandomState(3)", ("@.rand()", "@.seed(int($))"), ("@.rand()", "float(@.randint(0, 3))")),
    "ctypes": Container("ctypes.c_double(1.0)", ("@.value = $", "@.value += 1"), ("@.value",)),
    "ctypes_array": Container("(ctypes.c_double * 2)(1.0, 2.0)", ("@[0] = $", "@[1] += 1"), ("sum(@)", "@[1]")),
}
_ARRAYS = {
    "numpy": Container(
        "np.array([1.0, 2.0])", ("@[0] = $", "@ += 0.5", "np.copyto(@, $)"), ("float(@[0])", "@.sum().item()", "@.mean()")
    ),
    "numpy_view": Container("np.zeros((2, 3))[1, ::2]", ("@[0] = $", "@.base[1, 0] = $"), ("float(@[0])", "@.sum().item()")),
    "numpy_scalar": Container("np.float64(1.0)", ("@ = np.float64($)", "@ += 1"), ("float(@)", "@", "@.item()")),
    "numpy_record": Container("np.zeros(2, [('x', 'f8')])", ("@['x'] = $", "@[0]['x'] = $"), ("float(@['x'].sum())", "float(@[1]['x'])")),
    "numpy_objects": Container("np.array([1.0, Plain()], dtype=object)", ("@[0] = $", "@[1].x = $"), ("@[0]", "@[1].x")),
    "numpy_on_buffer": Container("np.frombuffer(bytearray(16))", ("@.base[0:1] = b'1'", "@[1] = $"), ("float(@[1])", "float(@.sum())")),
    "tensor": Container(
        "torch.tensor([1.0, 2.0])", ("@[0] = $", "@.add_(0.5)", "@.data[1] = $", "@ = @ + 1"), ("@.sum()", "@[0]", "@.max().item()")
    ),
    "tensor_of_numpy": Container("torch.from_numpy(np.ones(2, 'f4'))", ("@.numpy()[0] = $", "@[1] = $"), ("@.sum()", "@[0].item()")),
    "tensor_view": Container("torch.zeros(3, 2).t()[0]", ("@[0] = $", "@._base[1, 0] = $"), ("@.sum()", "@[1].item()")),
    "tensors_in_dict": Container("{'t': torch.ones(2)}", ("@['t'][0] = $", "@['t'] = torch.full((2,), $)"), ("@['t'].sum()", "@['t'][0]")),
    "tensor_list": Container("[torch.ones(2)]", ("@[0].mul_($)", "@.append(torch.ones(2) * $)"), ("@[-1].sum()", "sum(@).sum()")),
    "grown_tensor": Container("torch.ones(2)", ("@ = torch.cat([@, torch.ones(1)])", "@.resize_(3).fill_($)"), ("@.sum()", "@.numel() / 2")),
    "size": Container("torch.Size([2])", ("@ = torch.Size([int($) + 1])",), ("@[0] / 2", "@.numel() / 2")),
    "dtype": Container("torch.float32", ("@ = torch.float64", "@ = torch.int64"), ("torch.ones(1).to(@).element_size() / 8", "@.itemsize / 8")),
}  # fmt: skip

CONTAINERS: dict[str, Container] = {**_SEQUENCES, **_MAPPINGS, **_OBJECTS, **_FUNCTIONS, **_NUMBERS, **_ARRAYS}

PLACES = {
    "attribute": ("", "self.c{n} = {made}", "module.c{n}"),
    "class": ("", "type(self).c{n} = {made}", "type(module).c{n}"),
    "global": ("C{n} = {made}", "", "C{n}"),
    "held": ("BOX{n} = types.SimpleNamespace(c={made})", "", "BOX{n}.c"),
    "in_dict": ("", "self.d{n} = {{'c': {made}}}", "module.d{n}['c']"),
    "in_list": ("", "self.d{n} = [{made}]", "module.d{n}[0]"),
    "submodule": ("", "self.head.c{n} = {made}", "module.head.c{n}"),
    "callback": ("", "", "module.trainer.callbacks[0].c{n}"),
    "property": ("", "self._c{n} = {made}; type(self).p{n} = Through('_c{n}')", "module.p{n}"),
    "getattr": ("", "self.dynamic = Dynamic(); self.dynamic.kept['c{n}'] = {made}", "module.dynamic.c{n}"),
    "slot": ("", "self.s{n} = Slotted(); self.s{n}.x = {made}", "module.s{n}.x"),
    "dataclass_field": ("", "self.r{n} = Record(x={made})", "module.r{n}.x"),
    "other_module": ("sys.modules['held{n}'] = types.ModuleType('held{n}')\nimport held{n}\nheld{n}.c = {made}", "", "held{n}.c"),
    "closure": ("", "self.f{n} = holds({made})", "module.f{n}().c"),
    "function_note": ("def f{n}(): return f{n}\nf{n}.c = {made}", "", "f{n}().c"),
    "context_var": ("V{n} = contextvars.ContextVar('v{n}')\nV{n}.set(types.SimpleNamespace(c={made}))", "", "V{n}.get().c"),
    "weak": ("W{n} = Plain()\nW{n}.c = {made}\nR{n} = weakref.ref(W{n})", "", "R{n}().c"),
    "hparams": ("", "self.save_hyperparameters({{'h{n}': 1}}); self.hparams.h{n} = {made}", "module.hparams.h{n}"),
    "trainer": ("", "", "module.trainer.c{n}"),
}
"""Where a container is: a statement of the script, one of ``__init__``, and how a method gets there from ``module``."""
