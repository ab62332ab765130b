// Follows TensorBoard's theme: it marks the body of the page around the plugin's frame. Where there is no
// such page (the report as a file), the system's own setting decides.

const DARK = 'dark-mode';

/**
 * Keeps `data-theme` of the document true, calling `changed` after each change.
 * @param {() => void} changed
 */
export function followTheme(changed) {
  const root = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  const outer = outerBody();
  const apply = () => {
    const theme = (outer ? outer.classList.contains(DARK) : system.matches) ? 'dark' : 'light';
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    changed();
  };
  if (outer) new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ['class'] });
  else system.addEventListener('change', apply);
  apply();
}

function outerBody() {
  try {
    return window.parent === window ? null : window.parent.document.body;
  } catch {
    return null; // a page of another origin: it may not be looked at
  }
}

/**
 * The palette as CSS has it now, for what is drawn on a canvas.
 * @returns {Palette}
 */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = [
    'compute',
    'transfer',
    'wait',
    'copy',
    'input',
    'idle',
    'cpu',
    'cpu-wait',
    'comm-0',
    'comm-1',
    'comm-2',
    'comm-3',
    'comm-4',
    'comm-5',
    'on-compute',
    'on-phase',
    'hatch',
    'bg',
    'text',
    'muted',
    'line',
    'grid',
    'axis',
    'hover',
    'heat-0',
    'heat-1',
    'heat-2',
    'heat-3',
    'heat-4',
  ];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
