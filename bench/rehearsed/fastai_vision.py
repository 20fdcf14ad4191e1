"""fastai: a vision learner on a folder of images, one cycle in half precision."""

import sys

from fastai.vision.all import ImageDataLoaders, Resize, accuracy, resnet18, vision_learner

data = ImageDataLoaders.from_folder(sys.argv[1], valid_pct=0.2, item_tfms=Resize(96), bs=8, num_workers=0)
learner = vision_learner(data, resnet18, metrics=accuracy, pretrained=False).to_fp16()
learner.fit_one_cycle(2, 1e-3)
