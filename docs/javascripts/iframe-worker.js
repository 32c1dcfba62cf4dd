// Search in a page that was opened as a file: browsers start no worker from a file. The worker's
// script runs in a hidden frame instead, which has the functions of a worker that it calls. Without
// a file of this name the plugin `offline` of mkdocs-material would fetch one from another host.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.scope = frame.contentWindow;
    this.scope.document.open();
    this.scope.document.write("<!doctype html><body></body>");
    this.scope.document.close();
    this.scope.postMessage = (data) => this.receive(data);
    // A worker's own importScripts() returns when all have run; the theme awaits this one.
    this.scope.importScripts = async (...urls) => {
      for (const each of urls) await this.run(each);
    };
    this.started = this.run(url);
  }

  run(url) {
    return new Promise((resolve, reject) => {
      const script = this.scope.document.createElement("script");
      script.onload = resolve;
      script.onerror = reject;
      script.src = url;
      this.scope.document.body.append(script);
    });
  }

  receive(data) {
    const message = new MessageEvent("message", { data });
    this.dispatchEvent(message);
    this.onmessage?.(message);
  }

  async postMessage(data) {
    await this.started;
    this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }));
  }

  terminate() {
    this.scope.frameElement.remove();
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
  window.IFrameWorker = FrameWorker; // the theme looks for this name
}
