"""`/docs`: the API, to read and to try, without anything loaded from elsewhere."""

from fastapi import APIRouter, Request, Response

from noisescale_server.web.pages import page

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def get_docs(request: Request) -> Response:
    """The OpenAPI document as a page; needs no token, as there is nothing of a run in it."""
    return page(request, "docs.html")
