"""One call for every regime: prompts x conditions -> generations."""

from kvrepro.protection.harness import boundary_attention, generate

__all__ = ["boundary_attention", "generate"]
