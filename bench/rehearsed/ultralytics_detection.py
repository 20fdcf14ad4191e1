"""Ultralytics: a small YOLO trained from its description, on a few drawn images."""

import sys

from ultralytics import YOLO

model = YOLO("yolo11n.yaml")
model.train(data=sys.argv[1], epochs=1, imgsz=320, batch=4, device=0, workers=0, plots=False, amp=False)
