"""Damages chapters on purpose, one line at a time, and checks that a test notices.

    python tests/damages.py              # all damages
    python tests/damages.py 02 13        # the damages of these chapters
    python tests/damages.py --list

Each damage has the one test that has to fail. All these tests look at behaviour: losses, gradients,
resumes, messages. The command works in a copy of the repository. First it runs the tests without
damage, since a test that always fails notices nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
JOB = "test_quick.py::test_one_job"
STREAMS = "test_quick.py::test_one_job_of_streams[04-streaming]"
SHARDS = "test_quick.py::test_one_job_of_shards[10-mds-shards]"
EQUAL = "test_equal.py::test_equal_to_chapter_1"
HOOKS = "test_compression.py::test_averages_are_those_of_the_definition"
CP = "test_context_parallel.py::test_one_group_trains_what_chapter_1_trains"
EP = "test_expert_parallel.py::test_losses_evaluation_and_resume"
THREE = "test_3d_parallel.py::test_one_pipeline_of_groups"
SL = "test_sparse_low_rank.py::"
LOCAL = "test_local_steps.py::"
LORA = "test_lora.py::test_equal_to_plain_peft[2]"
LORA_STATE = "test_lora.py::test_types_bytes_resume_and_final"
CHAT = "test_quick.py::test_one_job_of_conversations[16-chat]"
LABELS = "test_chat.py::test_labels_are_the_answers"
# For each chapter: what is wrong, a part of the script, what takes its place, the test
DAMAGES = {
    "01-single-gpu": [
        (
            "each micro-batch counts as a whole batch",
            "loss = loss / accumulation",
            "loss = loss / 1",
            "test_training.py::test_accumulation_is_the_larger_batch",
        ),
        (
            "gradients of the last step stay",
            "            optimizer.zero_grad()",
            "            optimizer.zero_grad",
            "test_resume.py::test_resume_is_exact",
        ),
        (
            "the schedule makes a step more at each resume",
            "scheduler.last_epoch -= 1",
            "scheduler.last_epoch += 0",
            "test_resume.py::test_resume_is_exact",
        ),
        (
            "other dropout masks after a resume",
            "torch.manual_seed(args.seed + first)",
            "first",
            "test_resume.py::test_resume_is_exact",
        ),
        (
            "the optimizer's state is not restored",
            "            part.load_state_dict(saved[name])",
            "            name == 'optimizer' or part.load_state_dict(saved[name])",
            "test_resume.py::test_resume_is_exact",
        ),
        (
            "a folder gets its name before its files are on the disk",
            "    os.sync()",
            "    os.getpid()",
            "test_resume.py::test_files_are_on_the_disk_before_a_folder_gets_its_name",
        ),
        (
            "a partial batch counts as a whole batch in the held-out loss",
            "loss_sum += loss * len(indices)",
            "loss_sum += loss * args.batch_size",
            f"{JOB}[02-ddp]",
        ),
        (
            "biases and norms decay",
            '"weight_decay": 0.0}',
            '"weight_decay": args.weight_decay}',
            "test_training.py::test_only_matrices_decay",
        ),
        (
            "gradients are not clipped",
            "max_norm = args.max_grad_norm or math.inf",
            "max_norm = math.inf",
            "test_training.py::test_clipping_decay_and_schedule",
        ),
        (
            "gradients are clipped before they are unscaled",
            "            scaler.unscale_(optimizer)\n",
            "",  # then the scaler unscales in its step
            "test_training.py::test_a_gradient_scaler_changes_nothing",
        ),
        (
            "the logged loss is a sum",
            "loss_sum.item() / (step - logged_step)",
            "loss_sum.item()",
            "test_training.py::test_logged_loss_is_the_mean_since_the_last_log",
        ),
        (
            "each epoch has the same order",
            "RandomState((args.seed, epoch))",
            "RandomState((args.seed, 0))",
            "test_data.py::test_the_order_is_a_function_of_seed_and_epoch",
        ),
        (
            "documents have no end",
            "[*ids, end] for ids in documents",
            "[*ids] for ids in documents",
            "test_data.py::test_one_end_of_text_after_every_document",
        ),
        (
            "text is cut without a care for what stands behind the last end of text",
            "(rest + text).split(",
            "text.split(",
            "test_data.py::test_memory_of_a_large_text_file",
        ),
        (
            "a flag of AdamW is forgotten",
            "betas=(0.9, args.adam_beta2)",
            "betas=(0.9, 0.999)",
            "test_training.py::test_second_beta_of_adam",
        ),
    ],
    "02-ddp": [
        (
            "all ranks read the same samples",
            "(micro_step * WORLD_SIZE + RANK) * args.batch_size",
            "(micro_step * WORLD_SIZE + 0) * args.batch_size",
            f"{JOB}[02-ddp]",
        ),
        (
            "all ranks have the same dropout masks",
            "torch.manual_seed(args.seed + first)",
            "torch.manual_seed(args.seed + state.samples)",
            "test_ddp.py::test_accumulation_and_ranks_are_the_same_to_the_bit_of_dropout",
        ),
        (
            "all micro-batches but the last average gradients",
            "require_backward_grad_sync = micro_step == accumulation - 1",
            "require_backward_grad_sync = micro_step != accumulation - 1",
            f"{JOB}[02-ddp]",
        ),
        (
            "the bare model computes, which never averages",
            "loss = ddp_model(",
            "loss = model(",
            f"{JOB}[02-ddp]",
        ),
        (
            "the logged loss is that of one rank",
            "            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)\n",
            "",
            f"{JOB}[02-ddp]",
        ),
        (
            "the held-out loss is that of one rank",
            "    dist.all_reduce(loss_sum)  # DDP: adds the sums",
            "    # DDP: adds the sums",
            f"{JOB}[02-ddp]",
        ),
        (
            "each rank keeps a cache of its own",
            '    """The token ids of each document',
            '    f"{RANK}"\n    """The token ids of each document',
            "test_data.py::test_a_node_tokenizes_once",
        ),
    ],
    "03-fsdp": [
        (
            "the optimizer's state is not restored",
            "dcp.load(saved, checkpoint_id",
            "dcp.load({key: saved[key] for key in saved if key != 'optimizer'}, checkpoint_id",
            f"{JOB}[03-fsdp]",
        ),
        (
            "the norm is that of one rank's shards",
            "grad_norm = grad_norm.full_tensor()",
            """shards = [parameter.grad.to_local() for parameter in model.parameters()]
            grad_norm = torch.nn.utils.get_total_norm(shards)""",
            f"{JOB}[03-fsdp]",
        ),
        (
            "a partial batch counts as a whole batch in the held-out loss",
            "loss_sum += loss * len(indices)",
            "loss_sum += loss * args.batch_size",
            f"{JOB}[03-fsdp]",
        ),
        (
            "buffers stay as they are in memory",
            "        source = whole.get_buffer(name) if RANK == 0 else buffer\n",
            "        source = buffer\n",
            f"{JOB}[03-fsdp]",
        ),
        (
            "each rank keeps what it finds in its memory",
            "    state_dict.set_model_state_dict(model, weights, options=how)\n",
            "",
            f"{JOB}[03-fsdp]",
        ),
        (
            "gradients are reduced in bf16",
            "reduce_dtype=torch.float32",
            "reduce_dtype=DTYPES[args.dtype]",
            "test_fsdp.py::test_bf16_is_gathered_and_fp32_is_reduced",
        ),
    ],
    "04-streaming": [
        (
            "the loss is divided by the labels of all ranks",
            "max(label_count, 1) / WORLD_SIZE",
            "max(label_count, 1)",
            STREAMS,
        ),
        (
            "the last token of a row counts as a label",
            "np.count_nonzero(row[1:] != PADDING) for row in rows)\n        label_count",
            "np.count_nonzero(row != PADDING) for row in rows)\n        label_count",
            STREAMS,
        ),
        (
            "a resumed run reads the rows of its window again",
            "islice(stream, used, None)",
            "islice(stream, 0, None)",
            STREAMS,
        ),
        (
            "the next window begins with documents of this one",
            "None if pass_is_over else documents.state_dict()",
            'None if pass_is_over else place["position"]',
            "test_streaming.py::test_two_resumes_in_a_row_across_passes",
        ),
        (
            "all ranks read the same documents",
            "split_dataset_by_node(documents, RANK, WORLD_SIZE)",
            "split_dataset_by_node(documents, 0, WORLD_SIZE)",
            STREAMS,
        ),
        (
            "a resumed run shuffles a window in another way",
            'np.random.RandomState((args.seed, place["rows"])).shuffle(rows)',
            "np.random.RandomState().shuffle(rows)",
            STREAMS,
        ),
        (
            "tokens between two batches are lost",
            "        rest = rows.pop()",
            "        rows.pop()",
            "test_streaming.py::test_packing_strategies[pack]",
        ),
        (
            "the held-out loss counts the first token of each row",
            "np.count_nonzero(row[1:] != PADDING) for row in rows)  # STREAM",
            "np.count_nonzero(row != PADDING) for row in rows)  # STREAM",
            STREAMS,
        ),
    ],
    "05-multi-node": [
        (
            "an asynchronous save writes what training changes meanwhile",
            "parts = STAGER.stage(parts)",
            "parts = dict(parts)",
            "test_multi_node.py::test_training_goes_on_while_files_are_written",
        ),
        (
            "a copy of the model is as large as the number of copies",
            "shape = (WORLD_SIZE // args.shard_size, args.shard_size)",
            "shape = (args.shard_size, WORLD_SIZE // args.shard_size)",
            "test_multi_node.py::test_losses_for_every_shard_size",
        ),
        (
            "a step counts although a rank lacks it",
            "return found[max(common)] if common else None",
            "return found[max(found)] if common else None",
            "test_multi_node.py::test_each_node_has_a_disk_of_its_own",
        ),
        (
            "a folder that nodes do not share is accepted",
            "is_shared = all(gather(probe.exists()))",
            "is_shared = any(gather(probe.exists()))",
            "test_multi_node.py::test_a_folder_that_nodes_do_not_share",
        ),
        (
            "the number of passes forgets the ranks",
            "size = args.batch_size * WORLD_SIZE",
            "size = args.batch_size",
            "test_multi_node.py::test_global_batch_size",
        ),
        (
            "copies add up the gradients of their first passes only",
            "model.set_requires_all_reduce(micro_step == accumulation - 1)",
            "model.set_requires_all_reduce(micro_step == 0)",
            "test_multi_node.py::test_losses_for_every_shard_size",
        ),
    ],
    "06-tensor-parallel": [
        (
            "groups are counted by modulo in the evaluation",
            "dp_rank = RANK // args.tensor_parallel\n    for begin",
            "dp_rank = RANK % args.tensor_parallel\n    for begin",
            f"{JOB}[06-tensor-parallel]",
        ),
        (
            "the ranks of a group read different batches",
            "(micro_step * dp_size + dp_rank)",
            "(micro_step * dp_size + RANK)",
            f"{JOB}[06-tensor-parallel]",
        ),
        (
            "each rank counts positions from 0",
            ', "position_ids": positions}',
            "}",
            f"{JOB}[06-tensor-parallel]",
        ),
        (
            "each rank of a group adds the same held-out losses",
            "loss_sum.item() / samples / args.tensor_parallel",
            "loss_sum.item() / samples",
            f"{JOB}[06-tensor-parallel]",
        ),
        (
            "embeddings and head are not tied again after the split",
            "    model.tie_weights()\n",
            "",  # losses stay right, because shard_model ties again, but FSDP gathers both
            "test_tensor_parallel.py::test_each_rank_holds_its_part_of_everything",
        ),
        (
            "the ranks of a column form a group",
            'shape, mesh_dim_names=("dp", "tp")',
            'shape[::-1], mesh_dim_names=("tp", "dp")',
            f"{EQUAL}[4 shards and stages]",
        ),
    ],
    "07-pipeline-parallel": [
        (
            "each micro-batch counts as a whole batch",
            "loss_fn=lambda loss, target: loss / accumulation",
            "loss_fn=lambda loss, target: loss",
            f"{JOB}[07-pipeline-parallel]",
        ),
        (
            "the other stages add zeros to the mean loss",
            "losses.detach().mean() * args.pipeline_parallel",
            "losses.detach().mean()",
            f"{JOB}[07-pipeline-parallel]",
        ),
        (
            "the norm is that of the stages of one rank",
            "            dist.all_reduce(grad_norm, group=pipeline_group)\n",
            "",
            f"{JOB}[07-pipeline-parallel]",
        ),
        (
            "the head's gradient is forgotten",
            "            tied_head.add_gradients()\n",
            "",
            f"{JOB}[07-pipeline-parallel]",
        ),
        (
            "the head is a step old in the held-out loss",
            "                tied_head.copy_weight()  # PP: the update has changed the weight\n",
            "",
            f"{JOB}[07-pipeline-parallel]",
        ),
        (
            "the loss of samples that fill up the last batch is added",
            "                if counted:",
            "                if True:",
            f"{JOB}[07-pipeline-parallel]",
        ),
        (
            "only the first stage gets its buffers",
            "        buffer.data = sent[0][name]",
            "        if RANK == 0: buffer.data = sent[0][name]",
            f"{JOB}[07-pipeline-parallel]",
        ),
        (
            "a checkpoint lists only the parameters of the first stage",
            '        group["params"] = sorted(set().union(*names))',
            '        group["params"] = names[0]',
            f"{JOB}[07-pipeline-parallel]",
        ),
    ],
    "08-gradient-compression": [
        (
            "what was not sent is lost",
            "            spectrum += self.residuals[name]",
            "            spectrum += 0",
            "test_compression.py::test_nothing_is_lost_with_error_feedback",
        ),
        (
            "Q of PowerSGD is not saved",
            "self.powersgd.p_memory_dict, self.powersgd.q_memory_dict]",
            "self.powersgd.p_memory_dict, {}]",
            "test_compression.py::test_resume_on_the_same_ranks_is_exact[powersgd]",
        ),
        (
            "other ranks begin with the sum of the residuals",
            "+ tensor / len(files)",
            "+ tensor",
            "test_compression.py::test_other_ranks_begin_with_the_mean",
        ),
        (
            "gradients are added, and not averaged",
            "message = spectrum.gather(1, places) / WORLD_SIZE",
            "message = spectrum.gather(1, places)",
            f"{JOB}[08-gradient-compression]",
        ),
        (
            "the rows of the transform are not normalised",
            "torch.nn.functional.normalize(angles.cos())",
            "angles.cos()",
            f"{JOB}[08-gradient-compression]",
        ),
        (
            "the largest positive frequencies are sent",
            "spectrum.abs().topk(count)",
            "spectrum.topk(count)",
            f"{HOOKS}[('dct-topk', 0.1, True, 4)]",
        ),
        (
            "an all-reduce counts as half of its bytes",
            "            self.volume += 2 * message.nbytes",
            "            self.volume += message.nbytes",
            "test_compression.py::test_the_interface_counts_what_is_logged",
        ),
        (
            "the matrices of PowerSGD may change their width at a resume",
            ', "min_compress", "powersgd_rank"]',
            ', "min_compress"]',
            "test_compression.py::test_the_method_lasts",
        ),
    ],
    "09-hf-trainer": [
        (
            "each epoch has the same order",
            "RandomState((self.args.seed, epoch))",
            "RandomState((self.args.seed, 0))",
            "test_hf_trainer.py::test_order_of_samples",
        ),
        (
            "a checkpoint gets its name before all ranks have written",
            "        wait_for_everyone()\n        if args.should_save:\n            self.record",
            "        if args.should_save:\n            self.record",
            "test_quick.py::test_one_job_of_the_trainer[09-hf-trainer]",
        ),
        (
            "documents have no end",
            "[[*ids, tokenizer.eos_token_id] for ids in documents]",
            "[[*ids] for ids in documents]",
            "test_quick.py::test_one_job_of_the_trainer[09-hf-trainer]",
        ),
        (
            "a resumed run forgets its checkpoint",
            'return self.record["checkpoint"]',
            "return None",
            "test_quick.py::test_one_job_of_the_trainer[09-hf-trainer]",
        ),
    ],
    "10-mds-shards": [
        (
            "all ranks read the same rows",
            "order[first + RANK : end",
            "order[first:end",
            SHARDS,
        ),
        (
            "the loss is divided by the labels of all ranks",
            "max(label_count, 1) / WORLD_SIZE",
            "max(label_count, 1)",
            SHARDS,
        ),
        (
            "the next step reads the rows of this one",
            "next_first = state.samples + global_batch",
            "next_first = state.samples",
            SHARDS,
        ),
        (
            "the rows of a part keep their order",
            "generator.shuffle(part[begin : begin + args.shuffle_window])",
            "generator.shuffle(part[begin : begin + args.shuffle_window].copy())",
            "test_mds.py::test_each_row_once_in_an_epoch",
        ),
        (
            "each epoch has the same order of rows",
            "np.random.RandomState((args.seed, epoch))",
            "np.random.RandomState((args.seed, 0))",
            "test_mds.py::test_one_shard_is_shuffled_within_windows",
        ),
        (
            "the newest shard is removed",
            "self.cached.popitem(last=False)",
            "self.cached.popitem(last=True)",
            "test_mds.py::test_the_least_recently_used_shard_is_removed",
        ),
        (
            "a flipped bit is another token",
            "            check(shard)\n",
            "",
            "test_mds.py::test_a_flipped_bit_in_a_folder",
        ),
        (
            "a run goes on with other rows",
            '{"index_hash": index_hash}',
            '{"index_hash": None}',
            "test_mds.py::test_a_run_does_not_go_on_with_other_rows",
        ),
        (
            "neighbouring rows for each rank",
            "order[first + RANK : end : WORLD_SIZE]",
            "np.split(order[first:end], WORLD_SIZE)[RANK]",
            "test_mds.py::test_a_rank_downloads_some_of_the_shards[8-8]",
        ),
    ],
    "11-context-parallel": [
        (
            "each label is the token itself",
            "labels = input_ids.roll(-1, dims=1)",
            "labels = input_ids.clone()",
            CP,
        ),
        (
            "the last token gets the first one as its label",
            "    labels[:, -1] = -100",
            "    labels[:, -1]",
            CP,
        ),
        (
            "each rank counts positions from 0",
            '"position_ids": positions, ',
            "",
            CP,
        ),
        (
            "each rank divides by the labels of all ranks",
            "(args.seq_length - 1) / args.context_parallel",
            "(args.seq_length - 1)",
            CP,
        ),
        (
            "the held-out loss is N times too large",
            "loss_sum.item() / samples / args.context_parallel",
            "loss_sum.item() / samples",
            CP,
        ),
        (
            "late chunks are in the order of early chunks",
            "in_order = [*early, *late.flip(0)]",
            "in_order = [*early, *late]",
            f"{EQUAL}[4 tokens and experts]",
        ),
        (
            "the ranks of a group drop the same activations",
            " + RANK % args.context_parallel\n",
            "\n",
            "test_context_parallel.py::test_dropout_and_resume[heads]",
        ),
        (
            "the mask of a window is for a part of the sample",
            "q_length=n * q_length, kv_length=n * kv_length",
            "q_length=q_length, kv_length=kv_length",
            f"{EQUAL}[2]",
        ),
    ],
    "12-expert-parallel": [
        (
            "results come back in the order of experts",
            "returned[order.argsort()]",
            "returned[order]",
            EP,
        ),
        (
            "all experts of a token count the same",
            "results = results * shares[..., None]",
            "results = results * 0.5",
            EP,
        ),
        (
            "gradients of experts are divided by too few ranks",
            "experts.set_gradient_divide_factor(WORLD_SIZE)",
            "experts.set_gradient_divide_factor(groups)",
            EP,
        ),
        (
            "norms of two meshes are added up",
            "torch.stack(norms).norm()",
            "torch.stack(norms).sum()",
            EP,
        ),
        (
            "copies of tokens are made in the wrong order",
            "tokens[order // per_token]",
            "tokens[order % len(tokens)]",
            EP,
        ),
        (
            "some ranks of a column have no experts",
            "        if size % ranks == 0:\n            return Shard(dimension)\n",
            "        if size % ranks == 0:\n            return Shard(0)\n",
            "test_expert_parallel.py::test_even_shards[shape1-1]",
        ),
    ],
    "13-3d-parallel": [
        (
            "attention counts only the positions of this rank",
            "torch.arange(labels.shape[1], device=labels.device)[None]",
            "torch.arange(x.shape[1], device=labels.device)[None]",
            THREE,
        ),
        (
            "each rank of a group adds the same held-out losses",
            "loss_sum.item() / samples / args.tensor_parallel",
            "loss_sum.item() / samples",
            THREE,
        ),
        (
            "the norm is that of one stage",
            "            dist.all_reduce(grad_norm, group=pipeline_group)\n",
            "",
            THREE,
        ),
        (
            "the head's gradient is forgotten",
            "            tied_head.add_gradients()\n",
            "",
            THREE,
        ),
        (
            "the mesh is transposed",
            'mesh_dim_names=("pp", "dp", "tp")',
            'mesh_dim_names=("tp", "dp", "pp")',
            THREE,
        ),
        (
            "a rank of the head has a partner with other rows",
            "last_ranks = mesh.mesh[-1].flatten().tolist()",
            "last_ranks = mesh.mesh[-1].flatten().tolist()[::-1]",
            THREE,
        ),
    ],
    "14-sparse-low-rank": [
        (
            "the product has another scale",
            "self.scale = args.alpha / args.rank",
            "self.scale = args.alpha",
            f"{SL}test_gradients_and_merged_weights[llama]",
        ),
        (
            "the gradient of A has no scale",
            "grad_A = ctx.scale * (B.T.to(x.dtype) @ grad_w)",
            "grad_A = B.T.to(x.dtype) @ grad_w",
            f"{SL}test_gradients_and_merged_weights[llama]",
        ),
        (
            "B, A and S decay",
            "if p.dim() > 1 and p not in parts]",
            "if p.dim() > 1]",
            f"{SL}test_no_weight_decay_for_the_parts",
        ),
        (
            "matrices are replaced although they become larger",
            "if number_of_parameters(sparse) < number_of_parameters(linear):",
            "if True:",
            f"{SL}test_small_matrices_stay_dense",
        ),
        (
            "S begins with zeros",
            "torch.nn.init.uniform_(self.values, -bound, bound)",
            "torch.nn.init.zeros_(self.values)",
            f"{SL}test_every_value_is_initialised[llama]",
        ),
        (
            "S gets the gradients of other places",
            "grad_values = grad_w.flatten().index_select(0, support)",
            "grad_values = grad_w.flatten().index_select(0, support.flip(0))",
            f"{SL}test_gradients_and_merged_weights[llama]",
        ),
        (
            "places that are drawn twice are missing",
            "while missing > 0:",
            "while missing == count:",
            f"{SL}test_places_are_different_and_equally_likely[50-24]",
        ),
        (
            "a resume begins with new B, A and S",
            "    if checkpoint:\n        model.load_state_dict(",
            "    if False:\n        model.load_state_dict(",
            f"{SL}test_one_device_two_devices_and_a_resume",
        ),
    ],
    "15-local-steps": [
        (
            "the steps that only average have momentum",
            "if not averages_only:",
            "if True:",
            f"{LOCAL}test_a_run_is_the_plain_loop[averages first]",
        ),
        (
            "a checkpoint has a replica's weights in place of the shared weights",
            "weights | shared}",
            "weights}",
            f"{LOCAL}test_resume_within_a_round[shard]",
        ),
        (
            "a checkpoint has no weights of the replicas",
            '{"weights": weights, "opt',
            '{"opt',
            f"{LOCAL}test_resume_within_a_round[shard]",
        ),
        (
            "replicas have equal names in a checkpoint, so it keeps the state of one",
            "self.replica = model.replica_mesh.get_local_rank()",
            "self.replica = 0",
            f"{LOCAL}test_one_job",
        ),
        (
            "the outer momentum is not saved",
            'return parts | {"outer momentum": momentum}',
            "return parts",
            f"{LOCAL}test_one_job",
        ),
        (
            "the pseudo-gradient has the wrong sign",
            "gradients = {p: shared - p for",
            "gradients = {p: p - shared for",
            f"{LOCAL}test_one_job",
        ),
        (
            "replicas add up their pseudo-gradients",
            "dist.all_reduce(message, dist.ReduceOp.AVG, self.group)",
            "dist.all_reduce(message, dist.ReduceOp.SUM, self.group)",
            f"{LOCAL}test_one_job",
        ),
        (
            "momentum without Nesterov",
            "(gradient + beta * momentum)",
            "momentum",
            f"{LOCAL}test_one_job",
        ),
        (
            "AdamW's moments begin anew in each round",
            "                outer.step(averages_only)\n",
            """                outer.step(averages_only)
                for moments in optimizer.state.values():
                    moments["exp_avg"].zero_()
                    moments["exp_avg_sq"].zero_()
""",
            f"{LOCAL}test_one_job",
        ),
        (
            "replicas average AdamW's moments at the end of a round",
            "                outer.step(averages_only)\n",
            """                outer.step(averages_only)
                for moments in optimizer.state.values():
                    shard = moments["exp_avg"].to_local()
                    dist.all_reduce(shard, dist.ReduceOp.AVG, outer.group)
""",
            f"{LOCAL}test_one_job",
        ),
        (
            "each replica evaluates its own weights",
            """            outer.swap(model)
            with autocast:
                eval_loss = evaluate(model, eval_tokens, args, device)
            outer.swap(model)""",
            """            with autocast:
                eval_loss = evaluate(model, eval_tokens, args, device)""",
            f"{LOCAL}test_one_job",
        ),
        (
            "units that stay whole keep the old weights in an evaluation",
            "                module.reshard()\n",
            "                pass\n",
            f"{LOCAL}test_units_that_stay_whole",
        ),
        (
            "all replicas read the same samples",
            "(micro_step * WORLD_SIZE + RANK) * args.batch_size",
            "(micro_step * WORLD_SIZE + RANK % args.shard_size) * args.batch_size",
            f"{LOCAL}test_one_job",
        ),
        (
            "the last round is not ended",
            "step % args.inner_steps == 0 or at_end",
            "step % args.inner_steps == 0",
            f"{LOCAL}test_one_job",
        ),
        (
            "with more replicas, all begin with the state of the first",
            "replica = outer.replica % state.replicas",
            "replica = 0",
            f"{LOCAL}test_another_number_of_replicas",
        ),
        (
            "a resumed run starts its round with the shared weights of the last one",
            "        read_parts(checkpoint, saved)",
            """        own = f"weights of replica {replica}"
        read_parts(checkpoint, {n: part for n, part in saved.items() if n != own})""",
            f"{LOCAL}test_one_job",
        ),
    ],
    "16-chat": [
        (
            "a mean over the micro-batches of their means",
            "loss = model(**batch, num_items_in_batch=tokens_per_rank, use_cache=False).loss",
            "loss = model(**batch, use_cache=False).loss / accumulation",
            CHAT,
        ),
        (
            "each rank counts its own samples",
            "order[state.samples : state.samples + global_batch]].sum()",
            "order[state.samples + RANK * args.batch_size :][: args.batch_size]].sum()"
            " * WORLD_SIZE * accumulation",
            CHAT,
        ),
        (
            "the count is not divided by the ranks",
            "batch_tokens / WORLD_SIZE",
            "batch_tokens / 1",
            CHAT,
        ),
        (
            "a conversation sees the one before",
            "lambda p: (p == 0).cumsum(-1)",
            "lambda p: None",
            CHAT,
        ),
        (
            "the held-out loss is a mean over samples",
            "num_items_in_batch=one, use_cache=False).loss",
            "use_cache=False).loss",
            CHAT,
        ),
        (
            "labels are shifted by one",
            "labels[inside] = ids[inside]",
            "labels[inside] = np.roll(ids, -1)[inside]",
            f"{LABELS}[Llama-3]",
        ),
        (
            "answers by the lengths of tokenized prompts",
            "(begins >= begin) & (ends > begin)",
            "(np.arange(len(ids)) >="
            " len(tokenizer.encode(text['text'][:begin], add_special_tokens=False)))",
            f"{LABELS}[Llama-3]",
        ),
        (
            "all tokens have labels",
            "labels[inside] = ids[inside]",
            "labels[:] = ids",
            f"{LABELS}[ChatML]",
        ),
        (
            "the tokenizer adds a begin-of-text token",
            'text["text"], add_special_tokens=False',
            'text["text"], add_special_tokens=True',
            f"{LABELS}[Gemma]",
        ),
        (
            "one text for answers whose earlier turns have changed",
            'not prompt.startswith(texts[-1]["text"])',
            "False",
            f"{LABELS}[Qwen3]",
        ),
        (
            "cut answers have labels",
            "if end <= ends[-1]",
            "if True",
            "test_chat.py::test_answers_that_do_not_fit",
        ),
        (
            "the answer has no stop token",
            "sorted({stop_token, *known} - {None})",
            "known",
            CHAT,
        ),
        (
            "the places for FlashAttention ignore the samples",
            'batch["position_ids"].flatten() == 0',
            'batch["position_ids"][0] == 0',
            "test_chat.py::test_each_conversation_has_its_own_logits[varlen]",
        ),
    ],
    "17-lora": [
        (
            "B does not begin at 0",
            "target_modules=args.lora_targets,",
            "target_modules=args.lora_targets, init_lora_weights=False,",
            LORA,
        ),
        (
            "B A has another scale",
            "lora_alpha=args.lora_alpha,",
            "lora_alpha=args.lora_rank,",
            LORA,
        ),
        (
            "a resumed run has another base",
            "    whole = load_model(args, checkpoint=None)",
            "    args.from_scratch = bool(checkpoint)\n"
            "    whole = load_model(args, checkpoint=None)",
            LORA_STATE,
        ),
        (
            "adapters in bf16",
            "parameter.data = parameter.data.float()",
            "parameter.data = parameter.data.bfloat16()",
            LORA_STATE,
        ),
        (
            "frozen weights train, and have moments",
            "        if parameter.requires_grad:",
            "        if parameter.requires_grad_():",
            LORA_STATE,
        ),
        (
            "a checkpoint has the frozen weights, too",
            'adapters = {n: x for n, x in weights.items() if ".lora_" in n}',
            "adapters = weights",
            LORA_STATE,
        ),
        (
            "final/ has the head that is tied to the embeddings",
            'for n, x in weights.items() if ".lora_" in n}\n    return {f"base',
            'for n, x in weights.items()}\n    return {f"base',
            LORA_STATE,
        ),
    ],
}


@dataclass
class Damage:
    chapter: str
    what: str
    old: str
    new: str
    test: str

    def script(self, folder: Path) -> Path:
        return folder / self.chapter / "train-llm.py"

    def text(self) -> str:
        """The damaged script. The old line must be there once."""
        text = self.script(REPOSITORY).read_text()
        if text.count(self.old) != 1:
            sys.exit(
                f"error: {self.chapter} has not one place with {self.old!r}, as for: {self.what}"
            )
        return text.replace(self.old, self.new)


def damages() -> list[Damage]:
    return [Damage(chapter, *damage) for chapter, list_ in DAMAGES.items() for damage in list_]


def copy_repository(folder: Path) -> None:
    """All files but those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Status of pytest (0: all pass, 1: some fail), and its output."""
    command = [sys.executable, "-m", "pytest", "--all", "-n", "0", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{test}" for test in tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def verify(chosen: list[Damage]) -> bool:
    """Whether each damage is noticed."""
    problems = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        tests = sorted({damage.test for damage in chosen})
        status, output = run_tests(folder, tests)
        if status:
            print(output)
            sys.exit("error: without damage, these tests fail")
        print(f"{len(tests)} tests pass without damage", flush=True)
        for damage in chosen:
            script = damage.script(folder)
            undamaged = script.read_text()
            script.write_text(damage.text())
            status, output = run_tests(folder, [damage.test])
            script.write_text(undamaged)
            is_noticed = status == 1 and re.search(r"^\d+ failed", output, re.MULTILINE)
            reason = re.findall(r"^E +(.*)", output, re.MULTILINE) or output.splitlines()[-1:]
            verdict = f"noticed: {reason[0][:100]}" if is_noticed else f"MISSED (status {status})"
            print(f"{damage.chapter}: {damage.what}: {verdict}", flush=True)
            problems += not is_noticed
    print(f"{len(chosen) - problems} of {len(chosen)} damages are noticed")
    return problems == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", help="numbers, such as 02; without: all chapters")
    parser.add_argument("--list", action="store_true", help="only print the damages")
    args = parser.parse_args()
    chosen = [d for d in damages() if not args.chapters or d.chapter[:2] in args.chapters]
    if not chosen:
        parser.error("no chapter has one of these numbers")
    if args.list:
        for damage in chosen:
            print(f"{damage.chapter}: {damage.what} ({damage.test})")
        return
    sys.exit(0 if verify(chosen) else 1)


if __name__ == "__main__":
    main()
