"""Public models for images: those of torchvision, timm and transformers."""

from __future__ import annotations

from typing import Any

from rewire.bench.zoo.public import CAPTIONED, TRANSFORMERS, VIDEO, Public, timm, torchvision

_TORCHVISION = (
    *(torchvision(name) for name in ("resnet18", "densenet121", "mobilenet_v2", "efficientnet_b0")),
    torchvision("convnext_tiny"),
    *(torchvision(name) for name in ("squeezenet1_1", "regnet_y_400mf", "resnet50")),
    torchvision("vgg11_bn", small=None),
    *(torchvision(name) for name in ("mobilenet_v3_large", "efficientnet_v2_s")),
    *(torchvision(name) for name in ("shufflenet_v2_x1_0", "resnext50_32x4d", "mnasnet0_5")),
    torchvision("squeezenet1_0"),
    *(
        torchvision(name)
        for name in ("regnet_x_400mf", "mobilenet_v3_small", "swin_t", "swin_v2_t")
    ),
    torchvision("googlenet", options={"init_weights": False}),
    torchvision(
        "vit_b_16",
        kind="VisionTransformer",
        options={
            **{"patch_size": 16, "num_layers": 12, "num_heads": 12},
            **{"hidden_dim": 768, "mlp_dim": 3072},
        },
        small={"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128},
        sized="image_size",
    ),
    torchvision(
        "maxvit_t",
        kind="maxvit.MaxVit",
        **{
            "sized": "input_size",
            "options": {
                **{
                    "stem_channels": 64,
                    "block_channels": [64, 128, 256, 512],
                    "block_layers": [2, 2, 5, 2],
                },
                **{"head_dim": 32, "stochastic_depth_prob": 0.2, "partition_size": 2},
            },
            "small": {"block_channels": [32, 64], "block_layers": [1, 1], "stem_channels": 32},
        },
    ),
    torchvision(
        "fcn_resnet50", kind="segmentation.fcn_resnet50", options={"weights_backbone": None}
    ),
    torchvision(
        "deeplabv3_mobilenet_v3_large",
        kind="segmentation.deeplabv3_mobilenet_v3_large",
        options={"weights_backbone": None},
    ),
    torchvision("r3d_18", kind="video.r3d_18", data=VIDEO, size=32),
    torchvision("r2plus1d_18", kind="video.r2plus1d_18", data=VIDEO, size=32),
)

_TIMM = (
    timm("vit_tiny_patch16_224", depth=2),
    timm("mixer_s16_224"),
    timm("resnet26d"),
    timm("deit_small_patch16_224", depth=2),
    timm("swin_tiny_patch4_window7_224", depths=(1, 1), num_heads=(2, 4), embed_dim=32),
    timm("repvgg_a0"),
    timm("seresnet50", layers=(1, 1, 1, 1)),
    timm("deit3_small_patch16_224", depth=2),
    timm("beit_base_patch16_224", depth=2, embed_dim=64, num_heads=2),
    timm("eva02_tiny_patch14_224", size=56, depth=2),
    timm("xcit_nano_12_p16_224", depth=2),
    timm("edgenext_xx_small"),
    timm("convit_tiny", depth=3, local_up_to_layer=2),
    timm("swinv2_tiny_window8_256", depths=(1, 1), num_heads=(2, 4), embed_dim=32),
    timm("resmlp_12_224"),
    timm("gmlp_ti16_224"),
    timm("convmixer_768_32", size=32),
    timm("convnext_atto", depths=(1, 1, 2, 1)),
    timm("convnextv2_atto", depths=(1, 1, 2, 1)),
    timm("resnetv2_50", layers=(1, 1, 1, 1)),
    timm("skresnet18"),
    timm("resnest14d"),
    timm("res2net50_26w_4s", layers=(1, 1, 1, 1)),
    timm("dla34"),
    timm("dpn68b"),
    timm("regnety_002"),
    timm("regnetz_b16"),
    timm("mobilenetv2_050"),
    timm("mobilenetv4_conv_small_050"),
    timm("mobileone_s0"),
    timm("ghostnet_050"),
    timm("ghostnetv2_100"),
    timm("tinynet_e"),
    timm("lcnet_035"),
    timm("fbnetc_100"),
    timm("mixnet_s"),
    timm("tf_efficientnetv2_b0"),
    timm("hrnet_w18_small"),
    timm("cspresnet50"),
    timm("ese_vovnet19b_dw"),
    timm("rexnet_100"),
    timm("selecsls42"),
    timm("pit_ti_224", depth=(1, 1, 1)),
    timm("visformer_tiny", depth=(1, 1, 1)),
    timm("twins_svt_small", depths=(1, 1, 2, 1)),
    timm("pvt_v2_b0", depths=(1, 1, 1, 1)),
    timm("poolformer_s12"),
    timm("caformer_s18"),
    timm("convformer_s18"),
    timm("coat_tiny", serial_depths=(1, 1, 1, 1), parallel_depth=1),
    timm("coatnet_nano_rw_224"),
    timm("mobilevit_xxs"),
    timm("mobilevitv2_050"),
    timm("fastvit_t8"),
    timm("davit_tiny", depths=(1, 1, 1, 1)),
    timm("nest_tiny"),
    timm("levit_128s"),
    timm("cait_xxs24_224", depth=2),
    timm("tiny_vit_5m_224", depths=(1, 1, 1, 1)),
    timm("repvit_m0_9"),
    timm("inception_next_atto", depths=(1, 1, 1, 1)),
    timm("hgnetv2_b0"),
    timm("nf_resnet26"),
    timm("gernet_s"),
    timm("sequencer2d_s", layers=(1, 1, 1, 1)),
    timm("starnet_s1"),
    timm("xception41"),
    timm("botnet26t_256"),
)


def _transformer(name: str, kind: str, **more: Any) -> Public:
    """A vision transformer of transformers."""
    big = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6}
    little = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Public(
        *(name, TRANSFORMERS, kind),
        options={**big, "intermediate_size": 1536, **more},
        small={**little, "intermediate_size": 128},
        sized="image_size",
    )


def _towers(name: str, kind: str) -> Public:
    """A model of two transformers, for images and for text."""

    def towers(width: int, layers: int, heads: int) -> dict[str, Any]:
        common = {
            **{"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads},
            **{"intermediate_size": 4 * width, "projection_dim": width},
        }
        text = {
            **common,
            "vocab_size": 1000,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return {
            "text_config": text,
            "vision_config": {**common, "image_size": 64, "patch_size": 16},
        }

    return Public(
        name, TRANSFORMERS, kind, CAPTIONED, options=towers(384, 4, 6), small=towers(64, 2, 4)
    )


_TRANSFORMERS = (
    _transformer("vit", "ViTForImageClassification"),
    _transformer("deit", "DeiTForImageClassificationWithTeacher"),
    _transformer("dinov2", "Dinov2ForImageClassification", patch_size=16),
    _transformer("beit", "BeitForImageClassification"),
    _transformer(
        "vit_mae",
        "ViTMAEForPreTraining",
        decoder_num_hidden_layers=2,
        decoder_hidden_size=64,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=128,
    ),
    _towers("clip", "CLIPModel"),
    _towers("siglip", "SiglipModel"),
    Public(
        *("swin", TRANSFORMERS, "SwinForImageClassification"),
        options={"window_size": 4},
        small={"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4]},
        sized="image_size",
    ),
    Public(
        *("convnext", TRANSFORMERS, "ConvNextForImageClassification"),
        small={"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128]},
    ),
    Public(
        *("segformer", TRANSFORMERS, "SegformerForImageClassification"),
        small={"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128]},
    ),
    Public(
        *("resnet", TRANSFORMERS, "ResNetForImageClassification"),
        small={"depths": [1, 1, 1, 1], "embedding_size": 16, "hidden_sizes": [32, 64, 64, 128]},
    ),
    Public(*("mobilenet_v1", TRANSFORMERS, "MobileNetV1ForImageClassification")),
)

VISION = (*_TORCHVISION, *_TIMM, *_TRANSFORMERS)
