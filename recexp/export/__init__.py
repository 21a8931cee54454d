"""AOTInductor packages of a ranker, without and with KV cache: build.export writes one, package.Package serves it."""
