"""Where each family of models was published, and whose definition the counts are equal to."""

_TORCH = "torchvision's definition"
_TIMM = "the definition in pytorch-image-models (timm)"
SOURCES = {
    "alexnet": f"Krizhevsky 2014, arXiv 1404.5997; {_TORCH}",
    "vgg": f"Simonyan & Zisserman 2015, arXiv 1409.1556; {_TORCH}",
    "resnet": f"He et al. 2016, arXiv 1512.03385; {_TORCH}",
    "resnext": f"Xie et al. 2017, arXiv 1611.05431; {_TORCH}",
    "mobilenet_v1": f"Howard et al. 2017, arXiv 1704.04861; {_TIMM}",
    "mobilenet_v2": f"Sandler et al. 2018, arXiv 1801.04381; {_TORCH}",
    "mobilenet_v3": f"Howard et al. 2019, arXiv 1905.02244; {_TORCH}",
    "mobilenet_v4": f"Qin et al. 2024, arXiv 2404.10518; {_TIMM}",
    "mnasnet": f"Tan et al. 2019, arXiv 1807.11626; {_TORCH}",
    "shufflenet_v1": "Zhang et al. 2018, arXiv 1707.01083; megvii-model/ShuffleNet-Series",
    "shufflenet_v2": f"Ma et al. 2018, arXiv 1807.11164; {_TORCH}",
    "squeezenet": f"Iandola et al. 2016, arXiv 1602.07360; {_TORCH}",
    "ghostnet": f"Han et al. 2020, arXiv 1911.11907; {_TIMM}",
    "ghostnet_v2": f"Tang et al. 2022, arXiv 2211.12905; {_TIMM}",
    "efficientnet": f"Tan & Le 2019, arXiv 1905.11946; {_TIMM}",
    "efficientnet_v2": f"Tan & Le 2021, arXiv 2104.00298; {_TIMM}",
    "inception": f"Szegedy et al. 2015, arXiv 1409.4842; {_TORCH}",
    "densenet": f"Huang et al. 2017, arXiv 1608.06993; {_TORCH}",
    "unet": "Ronneberger et al. 2015, arXiv 1505.04597",
    "bert": "Devlin et al. 2019, arXiv 1810.04805; Hugging Face's model card",
    "gpt2": "Radford et al. 2019; Hugging Face's model card",
    "vit": f"Dosovitskiy et al. 2021, arXiv 2010.11929; {_TORCH}",
    "mobilevit": f"Mehta & Rastegari 2022, arXiv 2110.02178; {_TIMM}",
    "mobilevit_v2": f"Mehta & Rastegari 2022, arXiv 2206.02680; {_TIMM}",
    "mobile_former": "Chen et al. 2022, arXiv 2108.05895; AAboys/MobileFormer",
    "efficientformer": f"Li et al. 2022, arXiv 2206.01191; {_TIMM}",
    "efficientformer_v2": f"Li et al. 2023, arXiv 2212.08059; {_TIMM}",
}
"""By the start of a model's name; the longest that fits counts."""


def source_of(name: str) -> str:
    """Return the publication of a model, and the definition that its counts are compared with."""
    return SOURCES[max((family for family in SOURCES if name.startswith(family)), key=len)]
