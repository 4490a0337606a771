// Sound as it arrives: 16-bit samples, played one piece after another, and then a file to play again.

/** The pieces of one answer's sound. */
export class Sound {
  #pieces = [];
  #context = null;
  #nextS = 0;
  rate = 0;
  channels = 1;

  /** Take a piece; play it behind the last one if `isHeard`. */
  push(data, metadata, isHeard) {
    this.rate = metadata.sample_rate;
    this.channels = metadata.num_channels ?? 1;
    this.#pieces.push(data);
    if (isHeard) this.#play(data);
  }

  get seconds() {
    const size = this.#pieces.reduce((sum, one) => sum + one.byteLength, 0);
    return this.rate ? size / 2 / this.channels / this.rate : 0;
  }

  /** Stop playing. */
  stop() {
    this.#context?.close();
    this.#context = null;
  }

  #play(data) {
    this.#context ??= new AudioContext({ sampleRate: this.rate });
    const samples = new Int16Array(data.buffer, data.byteOffset, data.byteLength >> 1);
    const frames = Math.floor(samples.length / this.channels);
    if (!frames) return;
    const buffer = this.#context.createBuffer(this.channels, frames, this.rate);
    for (let channel = 0; channel < this.channels; channel += 1) {
      const target = buffer.getChannelData(channel);
      for (let frame = 0; frame < frames; frame += 1) target[frame] = samples[frame * this.channels + channel] / 32768;
    }
    const source = this.#context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#context.destination);
    this.#nextS = Math.max(this.#nextS, this.#context.currentTime + 0.05);
    source.start(this.#nextS);
    this.#nextS += buffer.duration;
  }

  /** All of it as a WAV file. */
  file() {
    const size = this.#pieces.reduce((sum, one) => sum + one.byteLength, 0);
    const head = new DataView(new ArrayBuffer(44));
    const text = (at, value) => [...value].forEach((one, index) => head.setUint8(at + index, one.charCodeAt(0)));
    text(0, "RIFF");
    head.setUint32(4, 36 + size, true);
    text(8, "WAVEfmt ");
    head.setUint32(16, 16, true);
    head.setUint16(20, 1, true);
    head.setUint16(22, this.channels, true);
    head.setUint32(24, this.rate, true);
    head.setUint32(28, this.rate * this.channels * 2, true);
    head.setUint16(32, this.channels * 2, true);
    head.setUint16(34, 16, true);
    text(36, "data");
    head.setUint32(40, size, true);
    return new Blob([head.buffer, ...this.#pieces], { type: "audio/wav" });
  }
}
