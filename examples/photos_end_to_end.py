"""From a folder of photos to image search: check, train, report, index, search, export.

    python examples/photos_end_to_end.py photos/            # photos/CLASS/IMAGE.jpg

The Python equivalent of nearkin data check, train, report, index, search and export.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.config import DataConfig
from nearkin.data import check_target
from nearkin.deploy import export_run
from nearkin.report import write_page
from nearkin.report.data_check import render
from nearkin.training import choose_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--out", type=Path, default=Path("end_to_end"))
    parser.add_argument("--recipe", help="name of a recipe, instead of choosing one for the photos")
    parser.add_argument("--epochs", type=int, help="number of epochs, instead of the recipe's")
    args = parser.parse_args()
    reporter = Reporter()
    photos = args.photos.resolve()

    print(render(check_target(str(photos), photos, reporter)))

    data = DataConfig(source="folder", root=photos)
    recipe, reason = choose_recipe(data, gpu=False)
    print(f"recipe: {reason}")
    if args.recipe:
        recipe = nk.recipes.find(args.recipe)
        recipe = replace(recipe, data=replace(recipe.data, source="folder", root=photos))
    if args.epochs:
        recipe = replace(recipe, train=replace(recipe.train, epochs=args.epochs))
    run = nk.fit(recipe, args.out / "runs", reporter=reporter)
    print(f"R@1 on unseen classes: {100 * run.result['test']['trained']['R@1']['mean']:.1f}")
    print(f"report: {write_page(run, args.out / 'report.html', reporter=reporter)}")

    files = sorted(path for path in photos.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    index = nk.Index.build(run.embedder(), files, [path.parent.name for path in files], run=run.path)
    index.save(args.out / "photos.index")
    query = index.ids[0]
    print(f"query:  {query}")
    for hit in index.search_item(query, k=5):
        print(f"        {hit.similarity:.3f}  {hit.id}")
    exported = export_run(run.path, "onnx", args.out / "model.onnx", reporter=reporter)
    print(f"model:  {exported.path}, differs by at most {exported.difference:.1e} on {exported.checks.what}")


if __name__ == "__main__":
    main()
