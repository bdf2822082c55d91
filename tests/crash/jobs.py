"""The jobs that are disturbed, and which of them reaches a fault point."""

import json

GLOO = {"zeroshard": {"transport": "gloo"}}
# A window that holds one unit, so that units are evicted all the time.
BOUNDED = {"zeroshard": {"window": "copy"}, "zero_optimization": {"stage3_max_live_parameters": 1000}}
# All states in files; more chunks than there are lanes.
NVME = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}, "sub_group_size": 1024}}
PARAMETERS = {"zero_optimization": {**NVME["zero_optimization"], "offload_param": {"device": "nvme", "max_in_cpu": 0}}}
POWER = {"zero_optimization": {**PARAMETERS["zero_optimization"], "stage3_param_persistence_threshold": 0},
         "zeroshard": {"durability": "power"}}
# In memory, and may be moved.
MOVABLE = {"offload_optimizer": {"device": "cpu", "pin_memory": False}, "sub_group_size": 4096}


def job(stage, extra=None, **options):
    return {"stage": stage, "steps": 4, "config-extra": json.dumps(extra or {}), **options}


JOBS = {
    "stage0": job(0),
    "stage1": job(1, **{"micro-steps": 3, "dtype": "bf16", "optimizer": "Adam"}),
    "stage1-ranks-first": job(1, {"zeroshard": {"reduction_order": "ranks_first"}}, **{"micro-steps": 2}),
    "stage2": job(2, {"gradient_clipping": 1.0}, **{"micro-steps": 2, "dtype": "fp16", "absent": True}),
    "stage3": job(3, **{"micro-steps": 2, "weighted": True, "absent": True, "frozen": "2,5"}),
    # Some parameters of a unit are updated less often than others.
    "sparse": job(2, absent=True),
    "bounded": job(3, BOUNDED, **{"optimizer": "SGD"}),
    "nvme": job(2, NVME, **{"micro-steps": 2, "dtype": "bf16", "absent": True}),
    "power": job(3, POWER, **{"frozen": "2,5"}),
    "gloo1": job(1, GLOO, **{"micro-steps": 3}),
    "gloo3": job(3, GLOO, **{"micro-steps": 2, "dtype": "bf16", "absent": True}),
    "nvme3": job(3, PARAMETERS, **{"micro-steps": 2, "dtype": "bf16", "weighted": True}),
    "nvme-gloo3": job(3, {**PARAMETERS, **GLOO}, **{"micro-steps": 2, "optimizer": "SGD"}),
}
