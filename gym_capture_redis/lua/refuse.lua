-- Records that the engine refused a call before generating, and settles its intent.
-- args[1]  incarnation to give the rollout if it is new
-- args[2]  incarnation of the attempt that the call belongs to, or '' for whichever is there
-- args[3]  call
-- args[4]  refusal code
-- args[5]  digest and details
-- Reply    OK | SAME (refused with this code already) | OTHER_CODE (nothing changed) |
--          CONFLICT (recorded already: the rollout is now incomplete) | FROZEN | RETIRED
-- Repeat   safe: SAME
local state, err = load_state()
if err then return err end
local expected, call, code = args[2], args[3], args[4]
if expected ~= '' and (not state or state.incarnation ~= expected) then return reply('RETIRED', state) end
if state then
  if state.status == 'retired' then return reply('RETIRED', state) end
  local known = redis.call('HMGET', key, 'x:' .. call, 'i:' .. call)
  if known[1] and string.sub(known[1], 1, #code + 1) == code .. '\0' then return reply('SAME', state) end
  if state.status == 'frozen' then return reply('FROZEN', state) end
  if known[1] then return reply('OTHER_CODE', state) end
  if known[2] then
    mark_failure(state, call, 'conflict')
    return reply('CONFLICT', state)
  end
else
  state = new_state(args[1])
end
state.intents = state.intents - redis.call('HDEL', key, 'n:' .. call)
state.seq = state.seq + 1
state.version = state.version + 1
state.refusals = state.refusals + 1
write(state, {'o:' .. state.seq, '0:x:' .. call, 'x:' .. call, code .. '\0' .. args[5]})
return reply('OK', state)
