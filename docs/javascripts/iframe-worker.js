// A Worker for pages opened from disk, where browsers refuse to start one: the search's script runs in a hidden frame.
// Material's offline plug-in would load such a replacement from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      this.inside.document.open();
      this.inside.document.write("<!doctype html><html><body></body></html>");
      this.inside.document.close();
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(new URL(each, url));
      };
      this.load(url).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    load(url) {
      return new Promise((loaded, failed) => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = loaded;
        script.onerror = failed;
        this.inside.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
