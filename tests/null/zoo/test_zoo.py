"""The zoo's CNNs have exactly the published number of parameters."""

from __future__ import annotations

import pytest
import torch

from support.zoo import MODELS

# torchvision 0.2x documentation, "num_params" of each model's weights (docs/source/models); Inception v3 with its
# auxiliary classifier; Xception: 22,855,952, pretrained-models.pytorch and Keras Applications (22.9 M).
PUBLISHED = {
    "vgg11": 132863336, "vgg11_bn": 132868840, "vgg13": 133047848, "vgg13_bn": 133053736,
    "vgg16": 138357544, "vgg16_bn": 138365992, "vgg19": 143667240, "vgg19_bn": 143678248,
    "resnet18": 11689512, "resnet34": 21797672, "resnet50": 25557032, "resnet101": 44549160, "resnet152": 60192808,
    "resnext50_32x4d": 25028904, "resnext101_32x8d": 88791336,
    "wide_resnet50_2": 68883240, "wide_resnet101_2": 126886696,
    "regnet_x_400mf": 5495976, "regnet_x_800mf": 7259656, "regnet_x_1_6gf": 9190136, "regnet_x_3_2gf": 15296552,
    "regnet_x_8gf": 39572648,
    "regnet_y_400mf": 4344144, "regnet_y_800mf": 6432512, "regnet_y_1_6gf": 11202430, "regnet_y_3_2gf": 19436338,
    "regnet_y_8gf": 39381472,
    "mobilenet_v2": 3504872, "mobilenet_v3_large": 5483032, "mobilenet_v3_small": 2542856,
    "mnasnet0_5": 2218512, "mnasnet0_75": 3170208, "mnasnet1_0": 4383312, "mnasnet1_3": 6282256,
    "efficientnet_b0": 5288548, "efficientnet_b1": 7794184, "efficientnet_b2": 9109994, "efficientnet_b3": 12233232,
    "efficientnet_b4": 19341616,
    "convnext_tiny": 28589128, "convnext_small": 50223688, "convnext_base": 88591464, "convnext_large": 197767336,
    "densenet121": 7978856, "densenet161": 28681000, "densenet169": 14149480, "densenet201": 20013928,
    "inception_v3": 27161264,
    "xception": 22855952,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "side"), [("regnet_y_400mf", 64), ("inception_v3", 299), ("densenet121", 64)])
def test_a_model_maps_images_to_classes(name: str, side: int) -> None:
    with torch.device("meta"):
        model = MODELS[name](classes=7)
        outputs = model(torch.empty(2, 3, side, side))
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        assert output.shape == (2, 7)
