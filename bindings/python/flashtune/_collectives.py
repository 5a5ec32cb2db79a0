"""Messages of context parallelism: rings, gathers and exchanges, each with its gradient.

Knows process groups and tensors of rows. `_ring` knows which rows meet.
"""

import torch
import torch.distributed as dist

from . import _ring
from ._errors import InvalidArgumentError

_agreed = set()
"""The forms of calls that a group has compared."""
_detours = {}
"""For each GPU a stream, and a tensor that its kernel writes."""


def place(group):
    """(rank, number of ranks) in a process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidArgumentError("there is no process group; call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidArgumentError("this process is not in the process group")
    return rank, dist.get_world_size(group)


def agree(group, tensors, call, refuse):
    """What `refuse` returns. Raises in all ranks if it raises in one, or if two ranks differ.

    On a GPU a form that the group has compared is not compared again, since comparing waits for the
    device.
    """
    rank, size = place(group)
    members = dist.group.WORLD if group is None else group
    error = form = None
    # Any error here: a rank that left without a word would keep the others waiting.
    try:
        for name, tensor in zip("qkv", tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch tensor")
        form = refuse(size, tensors, call)
        if tensors[0].is_cuda and (members, form) in _agreed:
            return form
    except Exception as found:
        error = found
    others = [None] * size
    dist.all_gather_object(others, str(error) if error else form, group=group)
    if error:
        raise error
    for other, found in enumerate(others):
        if isinstance(found, str):
            raise InvalidArgumentError(f"rank {other}: {found}")
        if found != form:
            raise InvalidArgumentError(f"rank {other} has sizes and options {found}; rank {rank} has {form}, and all must be the same")
    _agreed.add((members, form))
    return form


def in_order(parts, dim, layout):
    """The whole sequence from the rows of each rank."""
    size = len(parts)
    if layout == "contiguous":
        return torch.cat(parts, dim)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim) if size > 1 else parts[0]


def by_rank(whole, size, dim, layout):
    """The rows of each rank from the whole sequence."""
    if layout == "contiguous":
        return list(whole.chunk(size, dim))
    parts = whole.chunk(2 * size, dim)
    return [torch.cat([parts[at] for at in _ring.chunks(rank, size, layout)], dim) for rank in range(size)]


def _pass_on(buffer, group):
    """(the buffer that the previous rank sends, the messages to wait for); sends to the next."""
    rank, size = place(group)
    before, after = ((rank + step) % size for step in (-1, 1))
    if group is not None:
        before, after = dist.get_global_rank(group, before), dist.get_global_rank(group, after)
    incoming = torch.empty_like(buffer)
    messages = [dist.P2POp(dist.isend, buffer, after, group), dist.P2POp(dist.irecv, incoming, before, group)]
    works = dist.batch_isend_irecv(messages)
    if buffer.is_cuda:
        _give_head_start(buffer.device)
    return incoming, works


def _give_head_start(device):
    """Keeps the current stream behind the start of the messages that were just enqueued.

    The CTAs of an attention kernel stay on all SMs until it ends. If it started before NCCL's
    kernel, the messages would only start behind it. Both wait for the same work of this stream, so
    this stream takes a detour of one more event, and a kernel, over another stream.
    """
    here, detour = torch.cuda.current_stream(device), _detours.get(device)
    if detour is None:
        detour = _detours[device] = torch.cuda.Stream(device), torch.zeros(1, device=device)
    stream, number = detour
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        number.zero_()
    here.wait_stream(stream)


def _wait(works):
    for work in works:
        work.wait()


def _packed(*tensors):
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(buffer, *like):
    """Views of the packed tensors."""
    parts = buffer.split([x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like)]


def _keep(ctx, options, *tensors):
    ctx.options = options
    ctx.set_materialize_grads(False)  # A gradient of zeros into the LSE would cost time.
    ctx.save_for_backward(*tensors)


class Ring(torch.autograd.Function):
    """Keys and values travel once around, while each rank computes on those that it holds."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        group, layout, causal, scale, window, softcap, _ = options
        rank, size = place(group)
        total, keys = _ring.Sum(q, v.shape[-1]), (k, v)
        buffer = _packed(k, v) if size > 1 else None
        for step in range(size):
            is_last = step + 1 == size
            if not is_last:
                incoming, works = _pass_on(buffer, group)
            found = _pieces(rank, (rank - step) % size, size, layout, q.shape[1], causal, window)
            _ring.add_forward(total, found, q, *keys, scale, softcap)
            if not is_last:
                _wait(works)
                buffer, keys = incoming, _unpacked(incoming, k, v)
        out, lse = total.result()
        _keep(ctx, options, q, k, v, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        group, layout, causal, scale, window, softcap, deterministic = ctx.options
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        rank, size = place(group)

        def add(totals, found, k, v, works=()):
            """Adds the gradients of pieces to totals that `works` bring."""
            parts = _ring.backward(found, dout, q, k, v, out, lse, dlse, scale, softcap, deterministic)
            _wait(works)
            _ring.add_backward(totals, found, parts)

        dq, dk, dv = own = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        # The first half of the work on this rank's own keys hides the way of the first keys, the
        # second half the gradients' way home.
        first, last = _ring.halves(_pieces(rank, rank, size, layout, q.shape[1], causal, window))
        if size > 1:
            buffer = _packed(k, v)
            incoming, keys_on_the_way = _pass_on(buffer, group)
        add(own, first, k, v)
        gradients, on_the_way = None, ()
        for step in range(1, size):
            _wait(keys_on_the_way)
            buffer, keys = incoming, _unpacked(incoming, k, v)
            if step + 1 < size:
                incoming, keys_on_the_way = _pass_on(buffer, group)
            # The gradients of these keys follow them, one step behind.
            mine = torch.zeros_like(buffer, dtype=torch.float32) if gradients is None else gradients
            found = _pieces(rank, (rank - step) % size, size, layout, q.shape[1], causal, window)
            add((dq, *_unpacked(mine, k, v)), found, *keys, on_the_way)
            gradients, on_the_way = _pass_on(mine, group)
        add(own, last, k, v, on_the_way)
        if size > 1:
            for total, part in zip((dk, dv), _unpacked(gradients, k, v)):
                total += part
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class AllGather(torch.autograd.Function):
    """Each rank collects all keys and values, and computes on them in one go."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        group, layout, causal, scale, window, softcap, _ = options
        rank, size = place(group)
        total = _ring.Sum(q, v.shape[-1])
        whole = _gathered(k, v, group, layout)
        found = _ring.pieces_of_whole(_ring.chunks(rank, size, layout), size, q.shape[1], causal, window)
        _ring.add_forward(total, found, q, *whole, scale, softcap)
        out, lse = total.result()
        _keep(ctx, options, q, k, v, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        group, layout, causal, scale, window, softcap, deterministic = ctx.options
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        rank, size = place(group)
        whole = _gathered(k, v, group, layout)
        gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (q, *whole)]
        found = _ring.pieces_of_whole(_ring.chunks(rank, size, layout), size, q.shape[1], causal, window)
        parts = _ring.backward(found, dout, q, *whole, out, lse, dlse, scale, softcap, deterministic)
        _ring.add_backward(gradients, found, parts)
        parts = [by_rank(x, size, 1, layout) for x in gradients[1:]]
        buffers = torch.stack([_packed(*pair) for pair in zip(*parts)])
        if buffers.is_cuda:
            mine = torch.empty_like(buffers[0])
            dist.reduce_scatter_tensor(mine, buffers, group=group)
        else:
            # gloo does not scatter sums in all versions of PyTorch.
            dist.all_reduce(buffers, group=group)
            mine = buffers[rank]
        dk, dv = _unpacked(mine, k, v)
        return gradients[0].to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _gathered(k, v, group, layout):
    _, size = place(group)
    buffer = _packed(k, v)
    buffers = [torch.empty_like(buffer) for _ in range(size)]
    dist.all_gather(buffers, buffer, group=group)
    return [in_order(parts, 1, layout) for parts in zip(*(_unpacked(each, k, v) for each in buffers))]


def _pieces(rank, owner, size, layout, seqlen, causal, window):
    mine, others = (_ring.chunks(each, size, layout) for each in (rank, owner))
    return _ring.pieces(mine, others, seqlen // len(mine), causal, window)


def _rows_to_heads(x, group, layout):
    """(batch, seqlen, heads / ranks, dim) from (batch, seqlen / ranks, heads, dim)."""
    _, size = place(group)
    outgoing = x.unflatten(2, (size, -1)).movedim(2, 0).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return in_order(list(incoming), 1, layout)


def _heads_to_rows(x, group, layout):
    _, size = place(group)
    # torch.stack keeps an order of memory that it takes for channels_last.
    outgoing = torch.stack(by_rank(x, size, 1, layout)).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming.movedim(0, 2).flatten(2, 3)


class RowsToHeads(torch.autograd.Function):
    """Each rank gets all rows of its share of the heads."""

    @staticmethod
    def forward(ctx, x, group, layout):
        ctx.options = group, layout
        return _rows_to_heads(x, group, layout)

    @staticmethod
    def backward(ctx, gradient):
        return _heads_to_rows(gradient, *ctx.options), None, None


class HeadsToRows(torch.autograd.Function):
    """The reverse of `RowsToHeads`."""

    @staticmethod
    def forward(ctx, x, group, layout):
        ctx.options = group, layout
        return _heads_to_rows(x, group, layout)

    @staticmethod
    def backward(ctx, gradient):
        return _rows_to_heads(gradient, *ctx.options), None, None
