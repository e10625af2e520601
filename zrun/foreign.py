"""Options of other launchers that zrun does not have, and what to do instead. Pure."""

from __future__ import annotations

_OVER_SSH = "zrun starts every host itself, over SSH: leave it out"
_ONCE = "start zrun once; it starts every host of --hostfile itself"
_NO_RENDEZVOUS = "zrun knows its hosts before it starts, so there is no rendezvous: leave it out"

# DeepSpeed's, torchrun's and accelerate's, without dashes in front and with `_` inside.
INSTEAD = {
    "launcher": f"pdsh and MPI are not used, {_OVER_SSH}",
    "launcher_args": _OVER_SSH,
    "force_multi": "a host of a hostfile is always that host: leave it out",
    "no_ssh_check": "use --no_preflight",
    "machine_rank": f"{_ONCE}; where there is no SSH, use --no_ssh --node_rank N",
    "no_local_rank": "use --local_rank_arg off; without --as_deepspeed that is the default",
    "enable_each_rank_log": "use --log_dir DIR",
    "redirects": "use --log_dir DIR",
    "tee": "use --log_dir DIR; the console shows every rank",
    "local_ranks_filter": "use --show_ranks 0,3-5",
    "bind_core_list": "use --bind_cores_to_rank; on this machine, taskset -c LIST zrun ... narrows the cores",
    "numa_binding": "use --bind_cores_to_rank",
    "save_pid": "zrun ps shows the jobs and zrun kill JOB ends one",
    "venv_script": "name the environment's Python with python= in the hostfile",
    "elastic_training": "use --max_restarts, with --min_nodes",
    "nnodes": "use --hostfile FILE --num_nodes N",
    "num_machines": "use --hostfile FILE --num_nodes N",
    "nproc": "use --num_gpus N",
    "num_processes": "use --num_gpus N, the workers of each host",
    "gpu_ids": "use --include localhost:0,2, or CUDA_VISIBLE_DEVICES",
    "main_process_port": "use --master_port",
    "main_process_ip": "use --master_addr",
    "main_process_ip_port": "use --master_addr and --master_port",
    "standalone": "that is what zrun does without a hostfile: leave it out",
    "rdzv_backend": _NO_RENDEZVOUS,
    "rdzv_endpoint": "use --master_addr and --master_port, if at all",
    "rdzv_id": _NO_RENDEZVOUS,
    "rdzv_conf": _NO_RENDEZVOUS,
    "monitor_interval": "zrun sees the end of a worker at once: leave it out",
    "shutdown_timeout": "use --grace SECONDS",
    "log_level": "use -v for more",
    "quiet": "use --json or --plain",
    "config_file": "use --profile FILE for options of zrun; the training config goes behind the script",
    "c": "for a line of Python: zrun --no_python python -c LINE",
    "use_deepspeed": "leave it out",
    "mixed_precision": 'it is a key of the training config: "bf16": {"enabled": true}',
    "np": "use --num_gpus N, the workers of each host",
    "n": "use --num_gpus N, the workers of each host",
    "autotuning": "nothing is tried out; zrun plan says what fits into memory",
    "detect_nvlink_pairs": "leave it out, or order devices with CUDA_VISIBLE_DEVICES",
    "deepspeed_config": "it goes behind the script",
    "ds_config": "it goes behind the script",
}


def instead_of(option: str) -> str:
    """What to do instead of an option such as `--launcher`; empty if nobody has it."""
    return INSTEAD.get(option.lstrip("-").replace("-", "_"), "")
