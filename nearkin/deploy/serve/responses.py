"""Responses of `nearkin serve`, from which FastAPI generates /openapi.json."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

Id = Annotated[str, Field(description="Name of the item: its path below the indexed folder.")]
Label = Annotated[str | int | None, Field(description="Class of the item, if known.")]


class Response(BaseModel, extra="forbid"):
    """Base of all responses: no further fields."""


class Error(Response):
    error: str = Field(description="The problem, in one sentence.")


class Health(Response):
    status: Literal["ok"] = "ok"


class Item(Response):
    id: Id
    label: Label


class Hit(Item):
    similarity: float = Field(description="Cosine similarity, from -1 to 1.")


class Items(Response):
    total: int
    items: list[Item]


class SearchResponse(Response):
    hits: list[Hit] = Field(description="The nearest items, nearest first.")
    nearest: float = Field(description="Highest cosine similarity of any item, before re-ranking; -1 if there is none.")
    known: bool | None = Field(description="Whether `nearest` exceeds the threshold; null without calibration.")


class ItemSearchResponse(Item, SearchResponse):
    pass


class Limits(Response):
    max_upload_bytes: int
    max_pixels: int
    neighbours: int


class Info(Response):
    version: str
    items: int
    classes: int
    dim: int = Field(description="Dimensions per vector.")
    threshold: float | None = Field(description="Similarity above which a query is known; null without calibration.")
    limits: Limits
