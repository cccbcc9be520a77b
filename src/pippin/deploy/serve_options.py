"""Options of Ray Serve's deployments, and a Serve config file. Knows Ray's names, imports none."""

from __future__ import annotations

from typing import Any

from pippin.deploy.plan import Plan

# Ray's public name of it, ray.serve.llm.request_router, cannot be imported without vLLM or SGLang.
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
MAX_ROUTER_CHARS = 16_000_000  # of prompts, for each replica; the oldest are forgotten
STOP_SECONDS = 10  # what an engine takes to stop, at most
MAX_INGRESS_REQUESTS = 1024


def deployment_options(plan: Plan) -> dict[str, dict[str, Any]]:
    """By deployment, what `serve.deployment` takes."""
    ray = plan.ray
    stop_s = plan.config.server.drain_timeout + STOP_SECONDS
    options: dict[str, dict[str, Any]] = {
        "ingress": {
            "name": "ingress",
            "num_replicas": ray.ingress_replicas,
            "max_ongoing_requests": MAX_INGRESS_REQUESTS,
            "ray_actor_options": {"num_cpus": 0},
            "graceful_shutdown_timeout_s": stop_s,
        },
        "engine": {
            "name": "engine",
            "autoscaling_config": {
                "min_replicas": ray.min_replicas,
                "max_replicas": ray.max_replicas,
                "target_ongoing_requests": ray.target_ongoing_requests,
            },
            "max_ongoing_requests": ray.max_ongoing_requests,
            "ray_actor_options": {"num_cpus": ray.num_cpus, "num_gpus": ray.num_gpus},
            "graceful_shutdown_timeout_s": stop_s,
            "request_router_config": {
                "request_router_class": PREFIX_ROUTER,
                "request_router_kwargs": {
                    "imbalanced_threshold": ray.max_imbalance,
                    "do_eviction": True,
                    "eviction_threshold_chars": MAX_ROUTER_CHARS,
                    "eviction_target_chars": MAX_ROUTER_CHARS * 9 // 10,
                },
            },
        },
    }
    if plan.prefill is not None:
        options["prefill"] = {
            "name": "prefill",
            "num_replicas": plan.prefill.replicas,
            "ray_actor_options": {
                "num_cpus": plan.prefill.num_cpus,
                "num_gpus": plan.prefill.num_gpus,
            },
            "graceful_shutdown_timeout_s": stop_s,
        }
    return options


def serve_config(plan: Plan) -> dict[str, Any]:
    """For `serve deploy`, and for the RayService of KubeRay."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": plan.config.server.host, "port": plan.config.server.port},
        "applications": [
            {
                "name": plan.ray.name,
                "route_prefix": "/",
                "import_path": "pippin.deploy.ray_application:build",
                "args": plan.to_builtins(),
            }
        ],
    }
