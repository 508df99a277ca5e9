"""What each exercise leaves blank, what is expected of it, and the mistakes that are known."""

import re
from collections.abc import Callable
from dataclasses import dataclass

NUMBER = 8  # bytes of a number in fp64, and of an index


@dataclass
class Blank:
    """The lines of a script from `first` to `last`, and the comment that takes their place."""

    first: str
    last: str
    task: str


@dataclass
class Technique:
    """Without `memory`, the check does not look at memory: see README.md."""

    bytes_text: str  # the formula of the bytes that the original sends
    levels: dict[int, list[Blank]]
    # A sentence, the code of a script, and the code that takes its place. The check runs them all,
    # and compares their results with those of a wrong solution.
    mistakes: str
    memory: Callable | None = None  # (function, rank, ranks, collectives, between two) -> bytes
    memory_text: str = ""  # why these bytes are enough
    processes: tuple = (2, 4)

    def known_mistakes(self) -> list[tuple[str, str, str]]:
        return re.findall(r"^(.+)\n-(.+)\n\+(.+)$", self.mistakes, re.MULTILINE)


# DDP ---------------------------------------------------------------------------------------------


AVERAGE = Blank(
    "    return dist.all_reduce(",
    "    return dist.all_reduce(",
    "Start an all-reduce that replaces `tensor` (any shape) by its mean over all ranks, and return "
    "its request. Do not wait: an option of the collective returns the request.",
)
BUCKETS = Blank(
    "    def send_bucket(weight):",
    "        request.wait()",
    "`weights[i].grad` is a part of `gradients` (4, 16, 16), and `buckets` has the parts of "
    "weights 0 and 1, and of weights 2 and 3, each (2, 16, 16). Run the backward pass of "
    "`loss_of(samples, weights)`. During it, start `average(bucket)` as soon as both gradients of "
    "a bucket are complete, and put the request into `requests`. "
    "`weight.register_post_accumulate_grad_hook(function)` calls `function(weight)` as soon as the "
    "gradient of this weight is complete; the last weight comes first. At the end, wait for each "
    "request.",
)
DDP = Technique(
    bytes_text="2 (N - 1) / N times the gradients",
    levels={
        1: [AVERAGE],
        2: [BUCKETS],
        3: [
            AVERAGE,
            Blank(
                "    gradients = torch.stack(",
                "        average(gradient).wait()",
                "Compute `gradients` (4, 16, 16): the gradients of `loss_of(samples, weights)` for "
                "the four `weights` (16, 16). Then make an all-reduce with `average` for each of "
                "the four gradients, and wait for it.",
            ),
            BUCKETS,
        ],
    },
    mistakes="""
the mean is in another tensor: the all-reduce has to write into `tensor`
-all_reduce(tensor, dist.ReduceOp.AVG
+all_reduce(tensor / world_size, dist.ReduceOp.SUM
""",
)


# FSDP --------------------------------------------------------------------------------------------


def fsdp_memory(function, rank, n, collectives, between):
    """The output of each layer, two gradients of outputs, and one shard that may be copied. Forward
    a whole weight while the next one arrives, its parts, and between collectives a copy of it.
    Backward also the gradients of two weights, and of the shards. After it, AdamW's moments and its
    sums."""
    activation = 2 * 8 * n * NUMBER
    shard = 8 * 8 * n * NUMBER
    weight = n * shard
    always = 6 * activation + shard
    begun = len(collectives)
    if begun <= 4:
        return always + (3 + between) * weight
    if begun < 12:
        return always + (5 + between) * weight + 4 * shard
    return always + 2 * weight + 6 * 4 * shard


GATHER = Blank(
    "    whole = [torch.empty_like(shard)",
    "    return torch.cat(whole)",
    "Return the whole weight (8 * world_size, 8 * world_size): the rows of the `shard` (8, 8 * "
    "world_size) of each rank, in the order of the ranks. `sent` is for your own use.",
)
BACKWARD = Blank(
    "    for layer in reversed(range(len(shards))):",
    "        sent.append((world_size - 1) * shards.grad[layer].nbytes)",
    "For each layer, the last one first: gather its weight from `shards[layer]` with `all_gather`. "
    "Compute the gradient of the weight from `x[layer]` (2, 8 * world_size) and `grad` (2, 8 * "
    "world_size). Compute the next `grad`. Free the weight. Then add up the gradient over all "
    "ranks, so that `shards.grad[layer]` (8, 8 * world_size) gets the rows of this rank only.",
)
FSDP = Technique(
    bytes_text="3 (N - 1) shards for each of 4 layers",
    memory=fsdp_memory,
    memory_text="one whole weight and the next one, in the backward pass a gradient, too, and then "
    "AdamW's moments of the shards. Free a weight when its layer has computed",
    levels={
        1: [
            GATHER,
            Blank(
                "        dist.reduce_scatter(",
                "        sent.append((world_size - 1) * shards.grad[layer].nbytes)",
                "Add up `weight_grad` (8 * world_size, 8 * world_size) over all ranks, so that "
                "`shards.grad[layer]` (8, 8 * world_size) gets the rows of this rank only. `grad` "
                "was divided by the number of all samples before, so this is a sum.",
            ),
        ],
        2: [BACKWARD],
        3: [
            GATHER,
            Blank(
                "    # Forward pass: gather, compute, free.",
                "    torch.optim.AdamW([shards]).step()",
                "Make a training step. `shards` (4, 8, 8 * world_size) are the shards of 4 "
                "weights, and `samples` (2, 8 * world_size) are those of this rank. A layer "
                "computes `x @ weight`. The loss is the mean of the squares of the output over the "
                "samples of all ranks. Gather a weight with `all_gather` before a layer computes, "
                "forward and backward, and free it after. Write the gradients of the shards into "
                "`shards.grad` (4, 8, 8 * world_size). Then make a step of `torch.optim.AdamW`.",
            ),
        ],
    },
    mistakes="""
the shards are joined in a wrong order
-    return torch.cat(whole)
+    return torch.cat(whole[::-1])
a gathered weight is transposed: a shard has rows of the weight
-    return torch.cat(whole)
+    return torch.cat(whole).T
the gradient of a weight is transposed: it is `x.T @ grad`, and not `grad.T @ x`
-x[layer].T @ grad
+grad.T @ x[layer]
`grad` has to go back through each layer: multiply it by the weight
-grad = grad @ weight.T
+pass
on the way back through a layer, `grad` is multiplied by the transposed weight
-grad = grad @ weight.T
+grad = grad @ weight
the gradient of a weight needs the input of its layer, and not the output
-x[layer].T @ grad
+x[layer + 1].T @ grad
the backward pass begins with the last layer
-in reversed(range(len(shards)))
+in range(len(shards))
""",
)


# Tensor parallelism ------------------------------------------------------------------------------

TENSOR_PARALLEL = Technique(
    bytes_text="4 (N - 1) times the tokens of a rank",
    # One and a half times the memory of the original, for tokens and for what belongs to the rank
    memory=lambda function, rank, n, collectives, between: (
        (4608 if function == "all_tokens" else 3456) * n + 3840
    ),
    memory_text="each rank computes with its own columns and rows only",
    levels={
        1: [
            Blank(
                "    parts = [torch.empty_like(part)",
                "    return torch.cat(parts)",
                "Return the rows of all ranks, in the order of the ranks. `part` (4, 16) has the "
                "rows of this rank, and the result is (4 * world_size, 16).",
            ),
            Blank(
                "    part = torch.empty(4, 16)",
                "    return part",
                "Add up `summand` (4 * world_size, 16) over all ranks, and return only the rows of "
                "this rank (4, 16): rank 0 gets the first four rows, and so on.",
            ),
        ],
        2: [
            Blank(
                "    tokens = spread(x).requires_grad_()",
                '    return {"x": add_up(grad_tokens)',
                "Compute this rank's summand of the layer relu(tokens A) B. The tokens are "
                "`spread(x)`, A is (16, 8) and B is (8, 16). `add_up` gives the output y. The loss "
                "is the sum of the squares of y, so its gradient is 2 y. Return a dictionary with "
                'the gradients "x", "A" and "B". Each of `spread` and `add_up` has to be called '
                "twice.",
            ),
        ],
    },
    mistakes="""
the output of a rank is its own summand: the summands were not added up
-add_up=all_reduce
+add_up=torch.nn.Identity()
the gradient of x has the summand of this rank only: add up in the backward pass, too
-{"x": add_up(grad_tokens)
+{"x": grad_tokens
an all-reduce gives each rank the rows of all ranks: a reduce-scatter sends half
-dist.reduce_scatter(part, list(summand.chunk(world_size)))
+dist.all_reduce(summand); part = summand.chunk(world_size)[rank]
parts are in a wrong order: in both collectives, part 0 of the list belongs to rank 0
-list(summand.chunk(world_size))
+list(summand.chunk(world_size))[::-1]
the gradient of the square of y is 2 y, not y
-grad_y = spread(2 * y)
+grad_y = spread(y)
""",
)


# Pipeline ----------------------------------------------------------------------------------------

MICRO_BATCH = 32 * 16 * NUMBER


def pipeline_memory(function, rank, n, collectives, between):
    """Rank 0 keeps outputs, and rank 1 keeps inputs and outputs. Two messages, and the gradient of
    the weight (16 x 16). While a pass computes, three tensors more."""
    kept = 4 if function == "gpipe" else 2 - rank
    return (kept * (1 + rank) + 2 + 3 * between) * MICRO_BATCH + 16 * 16 * NUMBER


RUN = Blank(
    '        if step == "F":',
    "            sent.append(x.pop(n).nbytes)",
    "Make one pass. F: put the input of micro-batch `n` (32, 16) into `x[n]`, and the output "
    "`relu(input @ weight)` into `y[n]`. Rank 0 has `micro_batches` (4, 32, 16) and sends the "
    "output to rank 1, with a request in `requests[n]`; rank 1 calls `receive()`. B: make the "
    "backward pass of `y[n]`, and forget what is not needed any more. The loss is the mean of the "
    "squares over the outputs of all 4 micro-batches. Rank 1 sends the gradient of its input; rank "
    "0 calls `receive()` for the gradient of its output.",
)
PIPELINE = Technique(
    processes=(2,),
    bytes_text="4 micro-batches",
    memory=pipeline_memory,
    memory_text="forget inputs, outputs and requests after the backward pass",
    levels={
        1: [
            Blank(
                "    dist.recv(tensor, 1 - rank)",
                "    dist.recv(tensor, 1 - rank)",
                "Wait for a message of the other rank, and write it into `tensor` (32, 16).",
            ),
            Blank(
                "                requests[n] = dist.isend(",
                "                requests[n] = dist.isend(",
                "Send `y[n]` (32, 16) to rank 1 without its graph, and do not wait. Put the "
                "request into `requests[n]`.",
            ),
            Blank(
                "            dist.send(x[n].grad, 0)",
                "            dist.send(x[n].grad, 0)",
                "Send the gradient of `x[n]` (32, 16) to rank 0.",
            ),
        ],
        2: [RUN],
        3: [
            Blank(
                "    tensor = torch.empty(32, 16)",
                "    return tensor.requires_grad_()",
                "Wait for a tensor (32, 16) of the other rank, and return it. It needs a gradient.",
            ),
            RUN,
            Blank(
                '    return run("F0 F1',
                '    return run("F0 F1',
                'Call `run` with the order of GPipe, for 4 micro-batches. It begins with "F0 F1".',
            ),
            Blank(
                '    orders = ["F0 F1',
                "    return run(orders[rank]",
                "Call `run` with the order of 1F1B for this `rank`. Rank 0 makes two forward "
                "passes first, and rank 1 makes one.",
            ),
        ],
    },
    mistakes="""
the message went into another tensor, and not into the one that is used
-return tensor.requires_grad_()
+return torch.zeros(32, 16).requires_grad_()
rank 0 starts its backward pass without the gradient that rank 1 has sent
-y.pop(n).backward(receive())
+receive(), y.pop(n).sum().backward()
the loss is the mean over the whole batch, and not over one micro-batch
-(4 * y.pop(n).numel())
+y.pop(n).numel()
""",
)


# Gradient compression ----------------------------------------------------------------------------

GRADIENT_COMPRESSION = Technique(
    bytes_text="5 (N - 1) times 32 numbers and 32 indices",
    levels={
        1: [
            Blank(
                "    parts = [torch.empty_like(part)",
                "    return torch.cat(parts)",
                "Return the tensors of all ranks in one tensor, in the order of the ranks. `part` "
                "(32) is the tensor of this rank. It holds numbers, or indices: integers.",
            ),
        ],
        2: [
            Blank(
                "        residual += gradient_of(weights, samples)",
                "        average = total / world_size",
                "Add `gradient_of(weights, samples)` (512) to the `residual` (512). Choose the 32 "
                "numbers of the residual with the largest absolute values, and set them to 0 in "
                "the residual. Send these numbers and their indices with `all_gather`. Compute "
                "`average` (512): the mean over the ranks of what was sent, and 0 elsewhere. Two "
                "ranks can choose the same index.",
            ),
        ],
    },
    mistakes="""
the values of this rank were added at the indices of the other ranks
-all_gather(values)
+torch.cat(world_size * [values])
numbers that were sent stay in the residual, so they are sent again
-        residual[indices] = 0
+        pass
numbers that were not sent are lost: the residual forgets them in the next step
-        residual += gradient_of
+        residual = gradient_of
the sum was not divided by the number of ranks
-average = total / world_size
+average = total
""",
)


# Local steps -------------------------------------------------------------------------------------

LOCAL_STEPS = Technique(
    bytes_text="3 x 2 (N - 1) / N times the weights",
    levels={
        1: [
            Blank(
                "        dist.all_reduce(gradient",
                "        sent.append(2 *",
                "Replace `gradient` (16, 16) by its mean over the ranks. It is how far the weights "
                "of this rank have moved in the round.",
            ),
        ],
        2: [
            Blank(
                "        gradient = shared - weights.detach()",
                "        weights.data.copy_(shared)",
                "The end of a round. How far have `weights` (16, 16) moved from `shared` (16, 16), "
                "in the direction of a gradient? Average this over the ranks. Update `momentum` "
                "(16, 16) and `shared` as SGD with Nesterov momentum of 0.9 and a learning rate of "
                "0.7 does. Then the weights of this rank become `shared`.",
            ),
        ],
    },
    mistakes="""
the sum was not divided by the number of ranks
-dist.all_reduce(gradient, dist.ReduceOp.AVG)
+dist.all_reduce(gradient)
the sign is wrong: a gradient is the start of the round minus its end
-gradient = shared - weights.detach()
+gradient = weights.detach() - shared
the next round does not begin with the shared weights
-        weights.data.copy_(shared)
+        pass
this is momentum without Nesterov's step ahead
-shared -= 0.7 * (gradient + 0.9 * momentum)
+shared -= 0.7 * momentum
""",
)


# Context parallelism -----------------------------------------------------------------------------

CONTEXT_PARALLEL = Technique(
    bytes_text="8 (N - 1) times two heads of the tokens of a rank",
    levels={
        1: [
            Blank(
                "    parts = torch.stack(",
                "    return torch.cat(tuple(received)",
                "`x` is (heads, tokens, 8), or three such tensors in one: `HEADS` and `TOKENS` "
                "count from the end. It has some tokens of all 2 * world_size heads, or all 4 * "
                "world_size tokens of two heads. Cut `x` into `world_size` equal parts along the "
                "dimension `split`. Part 0 goes to rank 0, and so on. Return the parts that "
                "arrive, joined along the dimension `join` in the order of the ranks.",
            ),
        ],
        2: [
            Blank(
                "    my_heads = exchange(",
                '    return {"output": y',
                "`my_tokens` (3, heads, 4, 8) has all heads. Get all tokens of this rank's two "
                "heads with `exchange`, compute causal `attention`, and bring the output back to "
                "`y` (heads, 4, 8). The loss is the sum of the squares of y, so its gradient is 2 "
                'y. Return "output" (y) and "gradients", those of `my_tokens`. Autograd ends at '
                "the exchanges: you need four of them.",
            ),
        ],
    },
    mistakes="""
the gradient of the output has to be exchanged, too, and it is 2 y
-output.backward(exchange(grad_y, split=HEADS, join=TOKENS))
+output.backward(output.detach())
the causal mask is missing: a token sees the tokens after it
-    y = exchange(output
+    y = exchange(attention(q, k, v)
""",
)


# Ring attention ----------------------------------------------------------------------------------


RING_ATTENTION = Technique(
    bytes_text="N times 2 blocks forward, and N times 4 blocks backward",
    levels={
        1: [
            Blank(
                "    received = torch.empty_like(block)",
                "    request.wait()",
                "Send `block` (any shape) to the next rank, and receive `received` (the same "
                "shape) from the previous rank. After the last rank comes rank 0. If all ranks "
                "wait until their message has arrived before they receive, all wait forever.",
            ),
        ],
        2: [
            Blank(
                "    output = torch.zeros_like(q)",
                "    return output, log_sum",
                "Compute `output` (6, 8): the attention of `q` (6, 8) to the keys and values of "
                "all ranks. Each of `k` and `v` is a block (6, 8). Use one block after the other, "
                "and get the next one with `pass_on` (both in one message), `world_size` times, so "
                "that the blocks return. The scores are `q @ k.T`. Return also `log_sum` (6, 1).",
            ),
        ],
    },
    mistakes="""
the output of the earlier blocks was not scaled down when a block was added
-output * (log_sum - new_log_sum).exp()
+output
the gradients of keys and values have to travel with their block
-        k, v, grad_k, grad_v = pass_on(
+        k, v, _, _ = pass_on(
""",
)


# Expert parallelism ------------------------------------------------------------------------------

EXPERT_PARALLEL = Technique(
    bytes_text="(N - 1) counts, and two rows of 16 for each token that leaves or arrives",
    levels={
        1: [
            Blank(
                "    received = torch.empty(sum(receive_counts), 16)",
                "    return received",
                "Send the first `send_counts[0]` of the `rows` (sum of `send_counts`, 16) to rank "
                "0, the next `send_counts[1]` rows to rank 1, and so on. Return the rows that "
                "arrive (sum of `receive_counts`, 16). Both counts are lists. `sent` is for your "
                "own use.",
            ),
            Blank(
                "    arriving_counts = torch.empty_like(counts)",
                "    return counts.tolist()",
                "`counts` (world_size) says how many tokens this rank sends to each rank. Find out "
                "how many tokens come from each rank. Return both as lists.",
            ),
        ],
        2: [
            Blank(
                "    order = choices.argsort()",
                '    return {"tokens": grad',
                "Sort the `tokens` (8, 16) by their expert (`choices`, 8 numbers), and send them "
                "to the ranks of their experts with `count` and `exchange`. The `expert` (16, 16) "
                "of this rank computes `tanh(rows @ expert)`. Send the results back, and put them "
                "into the order of `tokens`: this is y. The loss is the sum of the squares of y, "
                "so its gradient is 2 y. Send gradients the same way. Return the gradients of "
                '"tokens" and "expert".',
            ),
        ],
    },
    mistakes="""
the results came back sorted by expert: they have to go to the places of their tokens
-    y[order] = exchange(
+    y[:] = exchange(
""",
)


# Muon --------------------------------------------------------------------------------------------

MUON = Technique(
    bytes_text="twice (N - 1) / N times the rows of a rank",
    levels={
        1: [
            Blank(
                "    received = torch.empty_like(parts)",
                "    return received",
                "Send `parts[r]` (2, 4, 16) to rank r, for each rank. Return a tensor of the shape "
                "of `parts`, in which part r comes from rank r. `update` calls this twice.",
            ),
        ],
        2: [
            Blank(
                "    # To the owners: received[r, number]",
                '    return {"momentum": momentum',
                "`momentum` (world_size, 2, 4, 16) has 4 rows of each matrix: `momentum[owner, "
                "number]`. The whole matrix (4 * world_size, 16) has the rows of rank 0, then "
                "those of rank 1, and so on. `orthogonalize` needs the whole matrix. All ranks "
                "together may call it only once for each matrix. Return the rows of this rank of "
                'all orthogonal matrices, in the shape of `momentum`, as "update". Return '
                '"momentum", too.',
            ),
        ],
    },
    mistakes="""
the owner has the rows of all ranks, but each part was made orthogonal alone: join the rows first
-orthogonalize(whole).view(world_size, 4, 16)
+torch.stack([orthogonalize(rows) for rows in received[:, number].clone()])
the rows of a matrix are joined in a wrong order: rank 0 comes first
-received[:, number].flatten(0, 1)
+received[:, number].flip(0).flatten(0, 1)
the second exchange sends back what has arrived: put the new rows in its place
-        received[:, number] = orthogonalize(whole)
+        _ = orthogonalize(whole)
the updates stay with their owners: send each rank its own rows of all matrices
-"update": exchange(received)}
+"update": received}
""",
)


TECHNIQUES = {
    "ddp": DDP,
    "fsdp": FSDP,
    "tensor_parallel": TENSOR_PARALLEL,
    "pipeline": PIPELINE,
    "gradient_compression": GRADIENT_COMPRESSION,
    "local_steps": LOCAL_STEPS,
    "context_parallel": CONTEXT_PARALLEL,
    "ring_attention": RING_ATTENTION,
    "expert_parallel": EXPERT_PARALLEL,
    "muon": MUON,
}
