// BERT's forward pass. Vectors are rows of one array, token after token; layers and heads count from 0 here.
class Bert {
  // The model in a script of weights.py: files may be run, but not fetched.
  static load(address) {
    return new Promise((resolve, reject) => {
      window.bertWeights = (header, codes) => resolve(new Bert(header, codes));
      const onerror = () => reject(`${address} cannot be read`);
      const script = Object.assign(document.createElement("script"), { src: address, onerror });
      document.head.append(script);
    });
  }

  constructor(header, codes) {
    Object.assign(this, header);
    this.tokenizer = new WordPiece(header.vocabulary);
    this.width = this.vectors["embeddings.LayerNorm.bias"].length;
    this.size = this.width / this.heads;
    this.rows = (name, first, count) => unpacked(codes, this.matrices[name], first, count);
    for (const [name, { shape }] of Object.entries(this.matrices)) {
      // Of the words, only those of a text are ever read.
      if (name.startsWith("encoder")) this.matrices[name].values = this.rows(name, 0, shape[0]);
    }
  }

  encode(text) {
    return this.tokenizer.encode(text, this.longest);
  }

  // hidden: the hidden states, of which the first are the embeddings. layers: of each attention layer its queries, what
  // its keys are made from, and its weights by head, query and key.
  // change: { layer, read, query }: how what keys read and the queries of a layer are changed, row by row.
  run(ids, change = {}) {
    const hidden = [this.embedded(ids)], layers = [];
    for (let layer = 0; layer < this.layers; layer++) {
      const part = `encoder.layer.${layer}`, input = hidden[layer], same = (row) => row;
      const { read = same, query = same } = change.layer === layer ? change : {};
      const reads = byRow(input, this.width, read);
      const queries = byRow(this.linear(`${part}.attention.self.query`, input), this.width, query);
      const keys = this.linear(`${part}.attention.self.key`, reads);
      const values = this.linear(`${part}.attention.self.value`, input);
      const [weights, mixed] = this.attend(queries, keys, values, ids.length);
      layers.push({ queries, reads, weights });
      const attended = this.added(`${part}.attention.output`, mixed, input);
      const inner = this.linear(`${part}.intermediate.dense`, attended).map(gelu);
      hidden.push(this.added(`${part}.output`, inner, attended));
    }
    return { hidden, layers };
  }

  embedded(ids) {
    const [type] = [this.rows("embeddings.token_type_embeddings.weight", 0, 1)];
    const sums = new Float64Array(ids.length * this.width);
    ids.forEach((id, token) => {
      const word = this.rows("embeddings.word_embeddings.weight", id, 1);
      const position = this.rows("embeddings.position_embeddings.weight", token, 1);
      for (let i = 0; i < this.width; i++) sums[token * this.width + i] = word[i] + type[i] + position[i];
    });
    return this.normed("embeddings.LayerNorm", sums);
  }

  // Two rows of weights and four tokens at a time: what is read once serves eight products, which is four times as fast.
  linear(name, input) {
    const { values, shape: [outs, ins] } = this.matrices[`${name}.weight`], bias = this.vectors[`${name}.bias`];
    const tokens = input.length / ins, output = new Float64Array(tokens * outs);
    const at = (token) => Math.min(token, tokens - 1) * ins;
    for (let token = 0; token < tokens; token += 4) {
      const a = at(token), b = at(token + 1), c = at(token + 2), d = at(token + 3);
      for (let out = 0; out < outs; out += 2) {
        const row = out * ins, below = row + ins;
        let a0 = bias[out], b0 = a0, c0 = a0, d0 = a0, a1 = bias[out + 1], b1 = a1, c1 = a1, d1 = a1;
        for (let i = 0; i < ins; i++) {
          const first = values[row + i], second = values[below + i];
          const xa = input[a + i], xb = input[b + i], xc = input[c + i], xd = input[d + i];
          a0 += first * xa; b0 += first * xb; c0 += first * xc; d0 += first * xd;
          a1 += second * xa; b1 += second * xb; c1 += second * xc; d1 += second * xd;
        }
        // Past the last token, the last one is computed again.
        const put = (start, x, y) => { output[(start / ins) * outs + out] = x; output[(start / ins) * outs + out + 1] = y; };
        put(a, a0, a1); put(b, b0, b1); put(c, c0, c1); put(d, d0, d1);
      }
    }
    return output;
  }

  attend(queries, keys, values, tokens) {
    const { width, size, heads } = this, mixed = new Float64Array(tokens * width), weights = [];
    for (let head = 0; head < heads; head++) {
      const of = (token) => token * width + head * size;
      weights.push(Array.from({ length: tokens }, (_, query) => {
        const scores = Array.from({ length: tokens }, (_, key) => {
          let score = 0;
          for (let i = 0; i < size; i++) score += queries[of(query) + i] * keys[of(key) + i];
          return score / Math.sqrt(size);
        });
        const row = softmax(scores);
        row.forEach((weight, key) => {
          for (let i = 0; i < size; i++) mixed[of(query) + i] += weight * values[of(key) + i];
        });
        return row;
      }));
    }
    return [weights, mixed];
  }

  added(name, input, residual) {
    const sums = this.linear(`${name}.dense`, input).map((value, i) => value + residual[i]);
    return this.normed(`${name}.LayerNorm`, sums);
  }

  normed(name, input) {
    const scale = this.vectors[`${name}.weight`], shift = this.vectors[`${name}.bias`];
    return byRow(input, this.width, (row) => {
      const mean = average(row), variance = average(row.map((value) => (value - mean) ** 2));
      return row.map((value, i) => ((value - mean) / Math.sqrt(variance + this.epsilon)) * scale[i] + shift[i]);
    });
  }

  // What each dimension of what the key reads adds to the score of a pair: (q W_K) ∘ x, before the score is divided by
  // the root of the width of a head (Maruta and Matsuzaki 2024, eq. 7).
  contributions({ queries, reads }, layer, head, query, key) {
    const { values } = this.matrices[`encoder.layer.${layer}.attention.self.key.weight`];
    return Array.from({ length: this.width }, (_, dimension) => {
      let sum = 0;
      for (let i = head * this.size; i < (head + 1) * this.size; i++)
        sum += queries[query * this.width + i] * values[i * this.width + dimension];
      return sum * reads[key * this.width + dimension];
    });
  }
}

// Rows of a matrix of weights.py: the scale of each group, then its weights, several to a character.
const unpacked = (codes, { shape: [, columns], start, per, levels }, first, count) => {
  const values = new Float32Array(count * columns), group = 16, middle = (levels - 1) / 2;
  let at = 0, place = start + ((first * columns) / (group * per)) * (group + 1);
  const next = () => codes.charCodeAt(place++) - 256;
  while (at < values.length) {
    const scale = float16(next());
    for (let character = 0; character < group; character++)
      for (let code = next(), i = 0; i < per; i++, code = (code / levels) | 0)
        values[at++] = scale * ((code % levels) - middle);
  }
  return values;
};

const float16 = (bits) => {
  const exponent = bits >> 10, mantissa = bits & 1023;
  return exponent ? 2 ** (exponent - 15) * (1 + mantissa / 1024) : mantissa * 2 ** -24;
};

const byRow = (input, width, change) => {
  const output = new Float64Array(input.length);
  for (let start = 0; start < input.length; start += width)
    output.set(change(input.subarray(start, start + width), start / width), start);
  return output;
};

const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

const softmax = (scores) => {
  const largest = Math.max(...scores), powers = scores.map((score) => Math.exp(score - largest));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
};

// x Φ(x); Φ by Abramowitz and Stegun, 7.1.26, to 1e-7.
const gelu = (x) => {
  const size = Math.abs(x) / Math.SQRT2, t = 1 / (1 + 0.3275911 * size);
  const series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  const tail = 0.5 * series * Math.exp(-size * size);
  return x * (x < 0 ? tail : 1 - tail);
};
