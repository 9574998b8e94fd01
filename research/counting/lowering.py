"""What Inductor makes of a step for an H100, without one: bytes, launches and graphs of what torch.compile lowers.

Dynamo and AOTAutograd trace on fake tensors of a CPU; their graphs are moved to fake tensors of a GPU and lowered with
an H100's properties. The code is generated and neither compiled nor run, so that Triton's package is needed and no GPU.
"""

import copy
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import partition_fn
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import MemoryDep
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode, MultiOutput
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._sympy.functions import Max, Min
from torch.utils._triton import has_triton

from granite_scu.model import compilation, loss
from research.counting.insides import Insides, is_known
from research.counting.model_parts import is_product, part_of_node, sides
from research.counting.operators import Cost, Count, Step, Tagged, adapted, merged, total

H100 = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 * 2**20,
    gcnArchName="", max_threads_per_block=1024, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
)  # fmt: skip
"""The device's properties that Inductor asks for."""


Costs = dict[str, Cost]
"""By part of the model."""


class Lowering:
    """A backend of torch.compile that lowers each graph for an H100 and counts what every call of it takes.

    Args:
        name: of what is compiled.
        options: for Inductor.

    Attributes:
        found: costs by (part of the model, "forward" or "backward").
        graphs: of each that was lowered its name, pass, launches, products, code, bytes of what it returns, and calls
            of it in a step.
    """

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        self.name, self.options, self.found = name, options or {}, dict[tuple[str, str], Cost]()
        self.graphs: list[dict[str, Any]] = []
        self.insides = Insides()
        self.backend = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            decompositions=select_decomp_table(),
            partition_fn=partition_fn,
        )

    def _compiler(self, phase: str) -> Callable:
        def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable:
            with inductor_config.patch(self.options):
                costs, products, code = _lowered(graph, inputs, phase == "backward")
            for node in _operators(graph):
                arguments = fx.node.map_arg(node.args, lambda each: each.meta["val"])
                costs[part_of_node(node)] += self.insides.beyond(node.target, arguments)
            lowered = {"launches": total(costs).launches, "products": products, "code": code, "calls": 0}
            lowered["kept"] = _kept(graph)
            self.graphs.append(lowered | {"name": self.name, "phase": phase})
            kept = self.graphs[-1]

            def call(*arguments: Any) -> Any:
                kept["calls"] += 1
                for part, cost in costs.items():
                    self.found[part, phase] = self.found.get((part, phase), Cost()) + cost
                return graph.forward(*arguments)

            return make_boxed_func(call)

        return compile_graph


def _lowered(graph: fx.GraphModule, inputs: list[Any], is_backward: bool) -> tuple[Costs, dict[str, int], str]:
    """One run of a graph: costs by part, products by the library's function, and the code that Inductor writes."""
    graph, fakes = copy.deepcopy(graph), next(t.fake_mode for t in inputs if isinstance(t, FakeTensor))
    _draw_nothing(graph)
    with V.set_fake_mode(fakes):
        post_grad_passes(graph, is_inference=False)
    with as_on_h100(), fakes:
        moved = [_on_gpu(t) for t in inputs]
        for node in graph.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, _device_on_gpu)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _device_on_gpu)
        graph.recompile()
        with V.set_fake_mode(fakes), V.set_debug_handler(DebugContext()):
            FakeTensorProp(graph, mode=fakes).propagate_dont_convert_inputs(*moved)
            lowering = GraphLowering(graph, example_inputs=moved, is_inference=False, is_backward=is_backward)
            with V.set_graph_handler(lowering):
                lowering.run(*moved)
                code, _ = lowering.codegen()
                text = getattr(code, "value", code)
                costs: Costs = defaultdict(Cost)
                for kernel in lowering.scheduler.nodes:
                    costs[_part_of_kernel(kernel)] += Cost(_is_launched(kernel), _moved(kernel))
    for node in filter(is_product, graph.graph.nodes):
        costs[part_of_node(node)] += Cost(flops=_product_flops(node))
    products = Counter(re.findall(r"extern_kernels\.(\w+)\(", text))
    return costs, dict(products), text


def _kept(graph: fx.GraphModule) -> int:
    """Bytes of what a graph returns that were not there before; of a forward pass, what is kept for the backward."""

    def storages(nodes: Iterable[Any]) -> dict[int, int]:
        tensors = [node.meta.get("val") for node in nodes if isinstance(node, fx.Node)]
        found = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
        return {storage._cdata: storage.nbytes() for storage in found}

    before = storages(graph.graph.find_nodes(op="placeholder"))
    (output,) = graph.graph.find_nodes(op="output")
    return sum(size for storage, size in storages(output.args[0]).items() if storage not in before)


def _is_launched(kernel: BaseSchedulerNode) -> bool:
    """Whether it is a kernel, and not a name for what another kernel returns."""
    return not isinstance(kernel, NopKernelSchedulerNode) and not isinstance(kernel.node, MultiOutput)


def _part_of_kernel(kernel: BaseSchedulerNode) -> str:
    """The part of the model that most of its operators belong to; a product brings the views of its inputs along."""
    nodes = [node for each in kernel.get_nodes() if each.node is not None for node in each.node.get_origins()]
    parts = Counter(map(part_of_node, list(filter(is_product, nodes)) or nodes))
    return parts.most_common(1)[0][0] if parts else "else"


def _moved(kernel: BaseSchedulerNode) -> int:
    """Bytes of the numbers that a kernel reads and writes; of parts of a tensor that overlap the sum, to the whole.

    Inductor's own count takes a tensor as read whole where a slice of it is read: the step sizes are 48 of the 6,448
    columns that a Mamba-2 layer projects. Numbers that lie apart count as if memory were read one by one. Rows
    that are read again by their neighbours, as a convolution does, are in a cache.
    """
    places: dict[tuple[str, Any], list[range]] = defaultdict(list)
    sizes: dict[tuple[str, Any], float] = {}
    views = []
    if isinstance(kernel, ExternKernelSchedulerNode) and _is_launched(kernel):
        views = [each for each in kernel.node.inputs if isinstance(each, IRNode)]
    for view in views:
        layout = view.get_layout()
        place = view.get_name(), (layout.offset, tuple(layout.size), tuple(layout.stride))
        places[place], sizes[place] = [range(1)], _bytes_of(layout)
    known = {view.get_name() for view in views}
    for access in kernel.read_writes.reads | kernel.read_writes.writes:
        is_whole = not isinstance(access, MemoryDep)
        if not (is_whole and access.name in known):
            index, rows = (None, range(1)) if is_whole else _index_of(access)
            places[access.name, index].append(rows)
            sizes[access.name, index] = math.inf if is_whole else access.numbytes_hint()
    moved: dict[str, float] = defaultdict(float)
    for (name, index), rows in places.items():
        moved[name] += sizes[name, index] * len(set().union(*rows)) / max(map(len, rows))
    counted = kernel.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return int(sum(min(size, moved[name]) for name, size in counted.items()))


def _index_of(access: MemoryDep) -> tuple[Any, range]:
    """Where an access reads but for by how many rows it is shifted; and these rows, if it is cut off at edges."""
    edges = access.index.atoms(Min, Max)
    outer = [edge for edge in edges if not any(other != edge and other.has(edge) for other in edges)]
    if len(outer) == 1:
        (edge,), sizes = outer, dict(zip(access.var_names, access.size, strict=True))
        last = {symbol: int(sizes[symbol]) - 1 for symbol in edge.free_symbols}  # a chunk and a token of it, or a row
        middle = {symbol: most // 2 for symbol, most in last.items()}
        steps = {s: int(edge.subs({**middle, s: at + 1}) - edge.subs(middle)) for s, at in middle.items()}
        if 1 in steps.values():
            row = sum(step * symbol for symbol, step in steps.items())
            first = int(edge.subs(dict.fromkeys(last, 0)))
            return (access.index.subs(edge, row), access.size), range(first, int(edge.subs(last)) + 1)
    return (access.index, access.size), range(1)


def _bytes_of(layout: Any) -> int:
    """Of the numbers of a view; a dimension that is expanded is there once."""
    sizes = (size for size, stride in zip(layout.size, layout.stride, strict=True) if stride != 0)
    return int(math.prod(sizes)) * layout.dtype.itemsize


def _draw_nothing(graph: fx.GraphModule) -> None:
    """Take attention out of what keeps the random numbers of a layer that is computed again: without dropout it draws
    none, and there is no GPU whose generator could be asked."""
    for node in list(graph.graph.nodes):
        if node.target not in (run_and_save_rng_state, run_with_rng_state):
            continue
        saves = node.target is run_and_save_rng_state
        operator, *arguments = node.args if saves else node.args[1:]
        with graph.graph.inserting_before(node):
            result = graph.graph.call_function(operator, tuple(arguments), node.kwargs)
            result.meta = dict(node.meta)
            kept = {"dtype": torch.uint8, "device": torch.device("cpu"), "pin_memory": False}
            state = graph.graph.call_function(torch.ops.aten.full.default, ([16], 0), kept)
            state.meta["val"] = torch.zeros(16, dtype=torch.uint8)
        for user in list(node.users) if saves else ():
            user.replace_all_uses_with((state, result)[user.args[1]])
            graph.graph.erase_node(user)
        if not saves:
            node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _operators(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of operators that are several kernels inside."""
    return (node for node in graph.graph.nodes if node.op == "call_function" and is_known(node.target))


def _product_flops(product: fx.Node) -> float:
    left, right = sides(product)
    return 2 * left.numel() * right.shape[-1]


def _on_gpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


def _device_on_gpu(value: Any) -> Any:
    return torch.device("cuda:0") if isinstance(value, torch.device) else value


@contextmanager
def as_on_h100() -> Iterator[None]:
    """torch and Triton as they answer where there is one H100."""
    import triton
    from triton.backends.compiler import GPUTarget

    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    driver = SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: properties),
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
    )
    answers: dict[str, Any] = {
        "current_device": lambda: 0, "device_count": lambda: 1, "get_device_properties": lambda device=None: H100,
        "is_available": lambda: True,
    }  # fmt: skip
    interface: dict[str, Any] = answers | {
        "is_bf16_supported": lambda *_, **__: True, "get_compute_capability": lambda device=None: 90,
        "is_triton_capable": lambda device=None: True, "raise_if_triton_unavailable": lambda device=None: None,
        "synchronize": lambda device=None: None,
    }  # fmt: skip
    extra: dict[str, Any] = {
        "get_device_capability": lambda device=None: (9, 0), "get_device_name": lambda device=None: H100.name,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in (answers | extra).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, answer in interface.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(inductor_config.patch(compile_threads=1, fx_graph_cache=False))
        triton.runtime.driver.set_active(driver)
        has_triton.cache_clear()  # what it answered before
        stack.callback(has_triton.cache_clear)
        yield


def count(step: Step) -> tuple[dict[tuple[str, str], Cost], list[dict[str, Any]]]:
    """The costs of a step with its layers and the loss's body compiled, by (part, pass); and the graphs."""
    torch.compiler.reset()
    layers, body = Lowering("layers", compilation.options_of("default")), Lowering("loss's body")
    compiled = torch.compile(loss._fused_work, backend=body.backend)
    with adapted(step) as (model, ids), mock.patch.object(loss, "_compiled_work", return_value=compiled):
        base = model.get_base_model()
        compilation.compile_decoder(base, backend=layers.backend)
        with torch.autocast("cpu", step.dtype, enabled=step.dtype != torch.float32, cache_enabled=False):
            nats = loss.summed_nats(base, ids, ids, ids, loss.chunk_on("cuda"), compiled=True)
        nats.backward()
    found = merged(layers.found, body.found, _outside(step))
    return found, layers.graphs + body.graphs


def _outside(step: Step) -> dict[tuple[str, str], Cost]:
    """The costs of what is not compiled: embedding, masks, and the loss's products."""

    def without_a_body(z: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        *_, dtype = arguments
        return torch.empty(()), torch.empty_like(z, dtype=dtype)

    counted = Count()
    with adapted(step) as (model, ids), mock.patch.object(loss, "_work", without_a_body):
        base = model.get_base_model()
        base.base_model.layers, base.base_model.norm = nn.ModuleList(), nn.Identity()
        base.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        autocast = torch.autocast("cpu", step.dtype, enabled=step.dtype != torch.float32, cache_enabled=False)
        with counted, Tagged(counted), autocast:
            nats = loss.summed_nats(base, ids, ids, ids, loss.chunk_on("cuda"))
        counted.phase = "backward"
        with counted:
            nats.backward()
    return counted.found
