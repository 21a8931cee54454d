// Loads an exported ranker, repeats the calls that were saved beside it, and compares the logits; no Python.
//
//   serve_package MODEL.pt2 CALLS.pt [largest relative difference, 1e-5]
//
// CALLS.pt is what recexp.export.package.save_calls wrote: {"tables": [..], "calls": [([inputs], logits), ..]}. With a
// KV cache the calls go to the same tables one after the other, so that each continues the history of those before.
// Exit code 0: all equal; 1: a difference; 2: not to be loaded or run.

#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

using Tensors = std::vector<at::Tensor>;

static Tensors tensors(const c10::IValue& list) {
  Tensors out;
  for (const c10::IValue& item : list.toListRef()) out.push_back(item.toTensor());
  return out;
}

static int run(const std::string& package, const std::string& path, double limit) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto saved = torch::jit::pickle_load(bytes).toGenericDict();

  torch::inductor::AOTIModelPackageLoader model(package);
  const c10::Device device(model.get_metadata().at("AOTI_DEVICE_KEY"));
  const auto move = [&](Tensors x) {
    for (at::Tensor& tensor : x) tensor = tensor.to(device);
    return x;
  };

  c10::InferenceMode guard;
  const Tensors tables = move(tensors(saved.at("tables")));
  int failed = 0, number = 0;
  for (const c10::IValue& call : saved.at("calls").toListRef()) {
    const auto& pair = call.toTupleRef().elements();
    if (pair.size() != 2) throw std::runtime_error("a call is (inputs, logits)");
    Tensors inputs = move(tensors(pair[0]));
    if (inputs.size() < 4) throw std::runtime_error("a call has four inputs or more");
    // The package's order: ids, offsets, candidates, rows; then the tables, which it appends to; then the metadata.
    inputs.insert(inputs.begin() + 4, tables.begin(), tables.end());
    const at::Tensor expected = pair[1].toTensor().to(at::kDouble);
    const at::Tensor logits = model.run(inputs).at(0).cpu().to(at::kDouble);
    if (logits.sizes() != expected.sizes()) throw std::runtime_error("the logits have another shape than the saved ones");
    const bool same = logits.equal(expected);  // also where there is nothing to divide by
    const double difference = same ? 0 : logits.sub(expected).norm().div(expected.norm()).item().toDouble();
    const bool equal = difference <= limit;
    std::cout << "call " << ++number << ": " << logits.size(0) << " candidates, relative difference " << difference
              << (equal ? "" : "  WRONG") << '\n';
    failed += !equal;
  }
  if (number == 0) throw std::runtime_error("no calls in " + path);
  return failed ? 1 : 0;
}

int main(int argc, char** argv) {
  char* end = nullptr;
  const double limit = argc > 3 ? std::strtod(argv[3], &end) : 1e-5;
  if (argc < 3 || (end && *end) || !(limit >= 0)) {
    std::cerr << "usage: serve_package MODEL.pt2 CALLS.pt [largest relative difference, 1e-5]\n";
    return 2;
  }
  try {
    return run(argv[1], argv[2], limit);
  } catch (const std::exception& error) {
    std::cerr << "serve_package: " << error.what() << '\n';
    return 2;
  }
}
