"""Classical metric learning on features: whitening, linear and kernel metrics, scikit-learn style.

    from nearkin import linear

    metric = linear.WithinClassWhitening(dim=512).fit(features, labels)
    embeddings = metric.transform(features)

The estimators need scikit-learn (`pip install 'nearkin[bench]'`); nearkin.linear.whitening does not.
"""
