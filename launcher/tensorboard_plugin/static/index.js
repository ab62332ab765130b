// TensorBoard imports this module into the plugin's frame and calls `render`.

import { App } from './app.js';
import { el } from './shared/dom.js';
import { HttpSource } from './source.js';

/** Draws the GPURUN tab. */
export async function render() {
  document.documentElement.lang = 'en';
  document.title = 'gpurun';
  await styled(new URL('./style.css', import.meta.url));
  const root = el('div', { id: 'gpurun' });
  document.body.append(root);
  await new App(root, new HttpSource(new URL('..', import.meta.url))).start();
}

/**
 * Waits for the style, so that nothing is drawn without it and then jumps.
 * @param {URL} address
 */
function styled(address) {
  return new Promise((resolve) => {
    const link = el('link', { rel: 'stylesheet', href: address.href, onload: resolve, onerror: resolve });
    document.head.append(link);
  });
}
