// Four views as one file: the same page over answers that are in the file itself.

import { App } from './app.js';
import { el } from './shared/dom.js';
import { DEVICE_PHASES } from './shared/phases.js';
import { last } from './shared/scale.js';
import { SourceError } from './source.js';
import { Address, State } from './state.js';

/** Draws the report from its data: gzipped JSON in base64, the text of the element `data`. */
export async function renderReport() {
  const data = await unpacked(document.getElementById('data')?.textContent ?? '');
  document.title = `${data.run.title} \u00b7 gpurun`;
  const root = el('div', { id: 'gpurun' });
  document.body.append(root);
  const address = new Address();
  await new App(root, new FileSource(data), new State(address)).start();
}

/** @param {string} text @returns {Promise<ReportData>} */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

/** Answers like the server, from what the file holds. */
export class FileSource {
  /** @param {ReportData} data */
  constructor(data) {
    this.data = data;
    this.live = false;
    this.views = ['splits', 'search', 'where', 'timeline'];
    this.timelines = new Map(
      Object.entries(data.timelines).map(([id, timeline]) => [id, new StoredTimeline(timeline)]),
    );
  }

  /**
   * @template {keyof Routes} R
   * @param {R} route
   * @param {Asked} [parameters]
   * @returns {Promise<Routes[R]>}
   */
  async get(route, parameters = {}) {
    return /** @type {Routes[R]} */ (this.answer(route, parameters)); // each case answers its own route
  }

  /** @param {keyof Routes} route @param {Asked} parameters @returns {Routes[keyof Routes]} */
  answer(route, parameters) {
    const variants = [parameters.variant ?? []].flat();
    const timeline = this.timelines.get(variants[0]);
    switch (route) {
      case 'runs':
        return this.runs();
      case 'run':
        return this.data.run;
      case 'steps':
        return this.steps(variants);
      case 'breakdown':
        return timeline?.data.breakdown ?? { state: 'none', problems: [] };
      case 'timeline/meta':
      case 'timeline/window':
      case 'timeline/event':
      case 'timeline/search':
      case 'timeline/selection':
        return timeline?.answer(route, parameters) ?? { state: 'none', problems: [] };
      default:
        throw new SourceError(`a report as a file has no ${route}`);
    }
  }

  /** @returns {RunsAnswer} */
  runs() {
    const { name, title, kind, version } = this.data.run;
    return {
      version,
      logdir: '',
      reload_s: 3600,
      truncated: false,
      runs: [{ name, title, kind, status: 'done', mtime_s: 0, version }],
    };
  }

  /** @param {string[]} ids @returns {StepsAnswer} */
  steps(ids) {
    const known = ids.filter((id) => this.data.steps[id]);
    return { variants: Object.fromEntries(known.map((id) => [id, this.data.steps[id]])) };
  }

  /**
   * @template {TracedRoute} R
   * @param {R} route
   * @param {Asked} parameters
   * @returns {Promise<Final<R>>}
   */
  async ready(route, parameters) {
    return /** @type {Final<R>} */ (this.answer(route, parameters)); // nothing is under way in a file
  }

  /** @returns {URL} */
  url() {
    throw noServer();
  }

  /** @returns {Promise<ArrayBuffer>} */
  async bytes() {
    throw noServer();
  }
}

/** One variant's timeline, stored as one answer to `timeline/window` over all of it. */
class StoredTimeline {
  /** @param {StoredAnswers} data */
  constructor(data) {
    this.data = data;
  }

  /** @param {TimelineRoute | 'timeline/meta'} route @param {Asked} asked */
  answer(route, asked) {
    switch (route) {
      case 'timeline/meta':
        return this.data.meta;
      case 'timeline/window':
        return this.data.window;
      case 'timeline/event':
        return this.event(asked);
      case 'timeline/search':
        return this.search(asked);
      default:
        return this.selection(asked);
    }
  }

  /**
   * All blocks, as a lane and an index.
   * @returns {Generator<[lane: LaneBlocks, index: number]>}
   */
  *blocks() {
    for (const lane of this.data.window.lanes)
      for (let index = 0; index < lane.row.length; index += 1) yield [lane, index];
  }

  /** @param {number} number @returns {Named} */
  named(number) {
    const { names, labels } = this.data.window;
    return { name: names[number], label: labels[number] };
  }

  /** @param {number} lane */
  rankOf(lane) {
    return this.data.meta.ranks.find((rank) => rank.lanes.some((each) => each.lane === lane));
  }

  /** @param {Asked} asked @returns {EventAnswer} */
  event({ id, collective, rank }) {
    const link = this.data.window.links.find((other) =>
      collective == null
        ? other.parts.some((part) => part[3] === Number(id))
        : other.collective === Number(collective),
    );
    const wanted =
      collective == null
        ? Number(id)
        : (link?.parts.find((part) => part[0] === Number(rank))?.[3] ?? link?.parts[0][3]);
    const pieces = [...this.blocks()].filter(([lane, index]) => lane.id[index] === wanted);
    if (!pieces.length) throw noBlock();
    const [lane, index] = last(pieces);
    const placed = this.rankOf(lane.lane);
    const own = placed?.lanes.find((each) => each.lane === lane.lane);
    if (!placed || !own) throw noBlock();
    const [start, end] = [pieces[0][0].start_ns[pieces[0][1]], lane.end_ns[index]];
    const step = this.data.meta.steps.find(
      (each) => each.rank === placed.rank && each.start_ns <= start && start < each.end_ns,
    );
    return {
      state: 'ready',
      problems: [],
      id: lane.id[index],
      name: this.data.window.names[lane.name[index]],
      class: this.data.meta.classes[lane.class[index]],
      rank: placed.rank,
      lane: lane.lane,
      row: lane.row[index],
      lane_label: own.label,
      step: step?.step ?? null,
      start_ns: start,
      end_ns: end,
      duration_ns: end - start,
      self_ns: null,
      exposed_ns: null,
      launched_by: null,
      parent: null,
      correlation: null,
      launch_to_start_ns: null,
      launches: null,
      collective: link ? this.collective(link) : null,
    };
  }

  /** @param {Link} link @returns {CollectiveAnswer} */
  collective(link) {
    const ofGroup = this.data.window.links.filter((other) => other.group === link.group);
    const at = ofGroup.indexOf(link);
    const ranks = link.parts.map(([rank, , , id, start, from, end]) => ({
      rank,
      id,
      start_ns: start,
      wait_ns: from - start,
      transfer_ns: end - from,
    }));
    const late = ranks.reduce((a, b) => (b.start_ns > a.start_ns ? b : a));
    return {
      collective: link.collective,
      kind: link.kind,
      group: link.group,
      seq: null,
      bytes: null,
      bus_gb_per_s: null,
      last_rank: late.rank,
      ranks,
      next: ofGroup[at + 1]?.collective ?? null,
      previous: ofGroup[at - 1]?.collective ?? null,
    };
  }

  /** @param {Asked} asked @returns {SearchAnswer} */
  search({ q = '', after_ns: after = 0 }) {
    const { names } = this.data.window;
    const found = [...this.blocks()]
      .filter(
        ([lane, index]) =>
          lane.name[index] >= 0 && names[lane.name[index]].toLowerCase().includes(q.toLowerCase()),
      )
      .map(([lane, index]) => ({
        id: lane.id[index],
        name: names[lane.name[index]],
        lane: lane.lane,
        row: lane.row[index],
        start_ns: lane.start_ns[index],
        end_ns: lane.end_ns[index],
      }));
    const events = found
      .filter((event) => event.start_ns >= after)
      .sort((a, b) => a.start_ns - b.start_ns)
      .slice(0, 200);
    return {
      state: 'ready',
      problems: [],
      total: found.length,
      events,
      names: [
        {
          name: q,
          count: found.length,
          total_ns: found.reduce((sum, event) => sum + event.end_ns - event.start_ns, 0),
        },
      ],
    };
  }

  /** @param {Asked} asked @returns {SelectionAnswer} */
  selection({ from_ns: from = 0, to_ns: to = 0, lanes = '' }) {
    const wanted = new Set(lanes.split(',').map(Number));
    const { classes, ranks } = this.data.meta;
    /** @type {Map<string, NameSum>} */
    const names = new Map();
    /** @type {Map<number | undefined, RankSums>} */
    const sums = new Map(
      ranks.map((rank) => [
        rank.lanes.find((lane) => lane.kind === 'overview')?.lane,
        { rank: rank.rank, idle_ns: to - from },
      ]),
    );
    for (const [lane, index] of this.blocks()) {
      const inside = Math.min(lane.end_ns[index], to) - Math.max(lane.start_ns[index], from);
      if (inside <= 0) continue;
      const share = inside / Math.max(1, lane.end_ns[index] - lane.start_ns[index]);
      const kind = classes[lane.class[index]];
      const sum = sums.get(lane.lane);
      if (sum) addClass(sum, kind, share * lane.busy_ns[index]);
      else if (wanted.has(lane.lane) && lane.name[index] >= 0)
        addName(names, this.named(lane.name[index]), kind, inside);
    }
    return {
      state: 'ready',
      problems: [],
      from_ns: from,
      to_ns: to,
      span_ns: to - from,
      ranks: [...sums.values()],
      names: [...names.values()].sort((a, b) => b.total_ns - a.total_ns).slice(0, 50),
    };
  }
}

/** @param {RankSums} sum @param {string} kind @param {number} ns */
function addClass(sum, kind, ns) {
  const phase = DEVICE_PHASES.find((name) => name === kind);
  if (!phase || phase === 'idle') return;
  sum[`${phase}_ns`] = (sum[`${phase}_ns`] ?? 0) + ns;
  sum.idle_ns = Math.max(0, sum.idle_ns - ns);
}

/** @param {Map<string, NameSum>} names @param {Named} named @param {string} kind @param {number} ns */
function addName(names, named, kind, ns) {
  const key = `${kind} ${named.name}`; // a collective's waiting and its transfer are two sums
  const known = names.get(key) ?? { ...named, class: kind, count: 0, total_ns: 0 };
  names.set(key, { ...known, count: known.count + 1, total_ns: known.total_ns + ns });
}

function noServer() {
  return new SourceError('a report as a file has no server');
}

function noBlock() {
  return new SourceError('this block is not in the report');
}
