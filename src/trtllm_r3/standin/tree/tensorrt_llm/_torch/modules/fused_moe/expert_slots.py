"""Which slots the experts of a layer lie in. Part of `interface.MoE`."""

from __future__ import annotations

import torch

from ....mapping import Mapping
from ...model_config import ModelConfig
from .moe_load_balancer import SingleLayerMoeLoadBalancer, get_moe_load_balancer
from .routing import BaseMoeRoutingMethod


class ExpertSlots:
    """One slot for each expert, or what a load balancer makes of them; all slots are here."""

    routing_method: BaseMoeRoutingMethod
    mapping: Mapping
    num_experts: int
    layer_idx: int | None
    layer_load_balancer: SingleLayerMoeLoadBalancer | None

    def _init_load_balancer(self, model_config: ModelConfig, wanted: bool) -> None:
        """Take part in the load balancer that is being set up, if there is one and it is `wanted`.

        KeyError or ValueError for assignments that leave an expert out.
        """
        self.layer_load_balancer = None
        self.repeat_idx, self.repeat_count = 0, 1
        self.num_slots = self.num_experts
        self.initial_global_assignments = list(range(self.num_experts))
        balancer, config = get_moe_load_balancer(), model_config.moe_load_balancer
        if wanted and balancer is not None and config is not None:
            self.num_slots = config.num_slots
            self.layer_load_balancer = balancer.add_layer(
                self.num_experts, self.routing_method.experts_per_token, config.num_local_slots
            )
            given = config.get_layer_initial_global_assignments(self.layer_idx)
            self.initial_global_assignments = given or [s % self.num_experts for s in range(self.num_slots)]
            self.layer_load_balancer.set_initial_weight_assignments(self.initial_global_assignments)
        self.expert_size_per_partition = self.num_slots
        self.slot_start, self.slot_end = 0, self.num_slots
        self.initial_local_expert_ids = self.initial_global_assignments[self.slot_start : self.slot_end]

    @property
    def slot_experts(self) -> list[int]:
        """The expert of each slot, now."""
        balancer = self.layer_load_balancer
        return self.initial_global_assignments if balancer is None else balancer.slot_experts

    def _supports_load_balancer(self) -> bool:
        """Whether ids are made outside of the experts' kernel."""
        return False

    def _using_load_balancer(self) -> bool:
        return self.layer_load_balancer is not None

    def _using_dynamic_load_balancer(self) -> bool:
        return self.layer_load_balancer is not None and not self.layer_load_balancer.is_static_routing()

    def _load_balancer_update_statistic(
        self, token_selected_experts: torch.Tensor, is_first_call: bool, is_last_call: bool
    ) -> None:
        """Count the logical expert ids `[rows, k]` of a chunk."""
        if self.layer_load_balancer is not None and self._using_dynamic_load_balancer():
            self.layer_load_balancer.update_statistic_with_local_ids(
                token_selected_experts, is_first_stage=is_first_call, is_last_stage=is_last_call
            )

    def _load_balancer_route(
        self, token_selected_experts: torch.Tensor, use_dp: bool = False
    ) -> torch.Tensor:
        """Slots `[rows, k]` of the logical expert ids; the ids themselves while nothing balances."""
        if self.layer_load_balancer is None:
            return token_selected_experts
        return self.layer_load_balancer.route(token_selected_experts, use_dp)
