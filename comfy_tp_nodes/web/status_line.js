// The status line of a model on the ranks, in the nodes that load and sample it: ranks, memory, step, time left.
//
// comfy_tp_nodes/status_feed.py sends its figures as "comfy_tp.status". The line is a widget that appears with the
// first of them; it is saved neither in workflows nor in prompts.

import { api } from '../../scripts/api.js'
import { app } from '../../scripts/app.js'

const EVENT = 'comfy_tp.status'
const WIDGET = 'tp_status'
const HEIGHT = 24
const OURS = /^TP[A-Z]/

const WORDS = {
  en: {
    ranks: (n) => (n === 1 ? '1 rank' : `${n} ranks`),
    each: (size) => `${size} each`,
    starting: 'starting',
    loading: (percent, speed) => `loading ${percent}% at ${speed} GB/s`,
    step: (step, steps) => `step ${step}/${steps}`,
    perStep: (seconds) => `${seconds} s/step`,
    left: (time) => `${time} left`,
    done: (steps, time) => `${steps} steps in ${time}`,
    gone: 'not loaded'
  },
  es: {
    ranks: (n) => (n === 1 ? '1 rango' : `${n} rangos`),
    each: (size) => `${size} cada uno`,
    starting: 'iniciando',
    loading: (percent, speed) => `cargando ${percent}% a ${speed} GB/s`,
    step: (step, steps) => `paso ${step}/${steps}`,
    perStep: (seconds) => `${seconds} s/paso`,
    left: (time) => `quedan ${time}`,
    done: (steps, time) => `${steps} pasos en ${time}`,
    gone: 'no cargado'
  },
  ja: {
    ranks: (n) => `${n} ランク`,
    each: (size) => `各 ${size}`,
    starting: '起動中',
    loading: (percent, speed) => `読み込み ${percent}% ${speed} GB/s`,
    step: (step, steps) => `ステップ ${step}/${steps}`,
    perStep: (seconds) => `${seconds} 秒/ステップ`,
    left: (time) => `残り ${time}`,
    done: (steps, time) => `${steps} ステップ ${time}`,
    gone: '未読み込み'
  },
  zh: {
    ranks: (n) => `${n} 个 rank`,
    each: (size) => `各 ${size}`,
    starting: '启动中',
    loading: (percent, speed) => `加载 ${percent}% ${speed} GB/s`,
    step: (step, steps) => `步 ${step}/${steps}`,
    perStep: (seconds) => `${seconds} 秒/步`,
    left: (time) => `剩余 ${time}`,
    done: (steps, time) => `${steps} 步 用时 ${time}`,
    gone: '未加载'
  }
}

function words() {
  const locale = app.extensionManager?.setting?.get?.('Comfy.Locale') ?? 'en'
  return WORDS[locale] ?? WORDS[locale.split('-')[0]] ?? WORDS.en
}

function size(bytes) {
  if (bytes < 1e6) return `${Math.round(bytes / 1e3)} KB`
  return bytes < 1e9 ? `${(bytes / 1e6).toPrecision(3)} MB` : `${(bytes / 1e9).toPrecision(3)} GB`
}

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`
  const whole = Math.round(seconds)
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, '0')} min`
}

// What the line says; `resting` once nothing of the prompt runs any more.
function text(line, resting = false) {
  const say = words()
  const parts = [say.ranks(line.ranks)]
  if (line.bytes_per_rank) parts.push(say.each(size(line.bytes_per_rank)))
  if (line.phase === 'gone') parts.push(say.gone)
  if (resting) return parts.join(' · ')
  if (line.phase === 'starting') parts.push(say.starting)
  if (line.phase === 'loading') {
    const percent = Math.floor((100 * line.done) / Math.max(line.total, 1))
    parts.push(say.loading(percent, line.gb_per_second.toFixed(2)))
  }
  if (line.phase === 'sampling') {
    const finished = line.step === line.steps
    if (finished) parts.push(say.done(line.steps, duration(line.seconds)))
    else parts.push(say.step(line.step, line.steps))
    const seconds = finished ? line.seconds / line.steps : line.step_seconds
    if (seconds) parts.push(say.perStep(seconds.toPrecision(2)))
    if (line.step && line.step < line.steps) parts.push(say.left(duration(line.seconds_left)))
  }
  return parts.join(' · ')
}

// The node of an execution id, which inside of subgraphs names the way to it: "98:12".
function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph
  let node = null
  for (const part of String(id).split(':')) {
    node = graph?.getNodeById(Number(part)) ?? graph?.getNodeById(part)
    graph = node?.subgraph
  }
  return node
}

function widgetOf(node) {
  const found = node.widgets?.find((widget) => widget.name === WIDGET)
  if (found) return found
  const element = document.createElement('div')
  element.style.cssText =
    'color: var(--input-text, #ddd); font: 11px/20px sans-serif; text-align: center; overflow: hidden; ' +
    'white-space: nowrap; text-overflow: ellipsis; pointer-events: none;'
  const widget = node.addDOMWidget(WIDGET, 'tp_status', element, {
    serialize: false,
    hideOnZoom: false,
    margin: 2,
    getValue: () => element.textContent,
    setValue: (value) => {
      element.textContent = element.title = value ?? ''
    },
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT
  })
  widget.serialize = false
  const [width, height] = node.computeSize()
  node.setSize([Math.max(node.size[0], width), Math.max(node.size[1], height)])
  return widget
}

const lines = new Map() // node id -> the line it shows

function show(id, line, resting) {
  const node = nodeOf(id)
  if (!node || !OURS.test(node.comfyClass ?? node.type)) return
  widgetOf(node).value = text(line, resting)
  node.setDirtyCanvas(true, false)
}

function rest() {
  for (const [id, line] of lines) {
    if (line.phase === 'gone') continue
    if (line.phase === 'sampling' && line.step === line.steps) continue
    show(id, line, true)
  }
}

app.registerExtension({
  name: 'comfy-tp.status-line',
  setup() {
    api.addEventListener(EVENT, ({ detail }) => {
      for (const id of detail.nodes) {
        lines.set(id, detail)
        show(id, detail, detail.phase === 'ready')
      }
    })
    api.addEventListener('execution_interrupted', rest)
    api.addEventListener('execution_error', rest)
  }
})
