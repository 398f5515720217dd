// Prints the greedy tokens of llama.cpp after each prompt: node llama_cpp.mjs '{"file": ..., "prompts": [[...]], "count": 64}'
// It runs in a folder with node-llama-cpp.
import {createRequire} from "module";
import {pathToFileURL} from "url";

const {getLlama, LlamaLogLevel} = await import(
  pathToFileURL(createRequire(process.cwd() + "/x.js").resolve("node-llama-cpp")).href
);
const {file, prompts, count} = JSON.parse(process.argv[2]);
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: file});
const exact = {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32", flashAttention: false};
const context = await model.createContext({contextSize: 512, threads: 1, ...exact});
const found = [];
for (const prompt of prompts) {
  const sequence = context.getSequence();
  const tokens = [];
  for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
    tokens.push(token);
    if (tokens.length >= count) break;
  }
  found.push(tokens);
  sequence.dispose();
}
console.log(JSON.stringify(found));
process.exit(0);
