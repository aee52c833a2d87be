"""A parameter is found by its name with and without what PEFT, DDP and torch.compile add to it."""

from __future__ import annotations

import peft
import pytest
import torch

from diagnostics.signals.parameter_names import adapter_names, plain_name
from diagnostics.signals.weight import find_weight
from sdo.errors import InputError


def test_plain_names():
    names = {
        "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight",
        "_orig_mod.module.lm_head.weight": "lm_head.weight",
        "base_model.model.lm_head.original_module.weight": "lm_head.weight",
        "base_model.model.lm_head.modules_to_save.mine.weight": "lm_head.weight",
        "base_model.model.a.base_layer.weight": "a.weight",
        "a.lora_embedding_A.mine": "a.lora_embedding_A",
    }
    assert {name: plain_name(name, ["mine"]) for name in names} == names


def test_a_plain_model_has_no_adapters(kit):
    model = kit.make_model()
    assert adapter_names(model) == ()
    assert adapter_names(peft.get_peft_model(model, kit.lora())) == ("default",)


def adapted(kit, **options):
    return peft.get_peft_model(kit.make_model(tied=False), kit.lora(**options))


def test_the_default_weight_under_lora_is_the_last_matrix_of_the_adapter(kit):
    found = find_weight(adapted(kit))
    assert (found.name, found.tied) == (kit.ADAPTER.format("B"), ())


LORA_B = "model.layers.1.mlp.down_proj.lora_B"


@pytest.mark.parametrize(
    "name",
    [
        f"{LORA_B}.weight",
        f"{LORA_B}.default.weight",
        f"base_model.model.{LORA_B}.weight",
        f"module.base_model.model.{LORA_B}.default.weight",
    ],
)
def test_wrappers_may_be_left_out_of_a_name_or_put_in(kit, name):
    for wrap in (lambda model: model, lambda model: torch.nn.ModuleDict({"module": model})):
        model = wrap(adapted(kit))
        found = find_weight(model, name)
        assert found.parameter is dict(model.named_parameters())[found.name]
        assert found.name.removeprefix("module.") == kit.ADAPTER.format("B")


def test_a_saved_module_is_meant_by_its_plain_name_and_not_its_frozen_original(kit):
    model = adapted(kit, modules_to_save=["lm_head"])
    found = find_weight(model, kit.HEAD)
    assert found.name == "base_model.model.lm_head.modules_to_save.default.weight"
    assert find_weight(model).name == found.name
    with pytest.raises(InputError, match=r"original_module\.weight' is frozen"):
        find_weight(model, "base_model.model.lm_head.original_module.weight")


def test_a_matrix_under_an_adapter_is_frozen_and_its_adapter_named(kit):
    with pytest.raises(InputError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' is frozen.*down_proj\.lora_"):
        find_weight(adapted(kit), kit.LAST_MATRIX)


def test_a_name_that_means_two_adapters_is_refused_with_both(kit):
    model = adapted(kit)
    model.add_adapter("second", kit.lora())
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(InputError, match="means several trainable parameters") as error:
        find_weight(model, f"{LORA_B}.weight")
    assert all(kit.ADAPTER.format("B").replace("default", name) in str(error.value) for name in ("default", "second"))
    assert "\n" not in str(error.value)
    full = kit.ADAPTER.format("B").replace("default", "second")
    assert find_weight(model, full).name == full
